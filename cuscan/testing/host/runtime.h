// What the runtime and the checker share: the threads of the running block, and the way to end a launch.
#pragma once
#include <link.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CUSCAN_RUNTIME
#include "prelude.h"

namespace host {

constexpr int max_threads = 1024, max_dynamic = 232448;

enum Kind {  // the order of _CLASSES in _errors.py
  no_error,
  out_of_bounds,
  misaligned,
  uninitialised,
  read_only,
  race,
  divergence,
  deadlock,
  bad_mask,
  trapped,
  division,
  crashed,
  timed_out,
  stack_overflow
};

struct Object {  // memory that kernels may touch; one state byte a byte, a cell for every four
  unsigned char* base;
  size_t size;
  unsigned char* state;
  struct Cell* cells;
};

struct Launch {
  const CuscanEntry* entry;
  void** arguments;
  uint3 grid, block;
  unsigned dynamic_bytes, stack_bytes;
  unsigned char* stacks;
  const Object* objects;
  size_t object_count;
  uint64_t seed, first_block;
  double timeout;  // seconds
  int order;       // 0 forward, 1 reverse, 2 random
};

struct Place {
  const char *op, *file;
  int line;
};

struct Error {
  int kind, thread, other;
  unsigned other_block;  // minus this one's index
  uint3 block;
  Place at, other_at;
  uintptr_t pc, other_pc, address;  // code addresses count from the start of the library
  unsigned size;
  int write;
  unsigned char missing[max_threads];  // 1 exited, 2 waits elsewhere, 3 never existed
};

enum State : unsigned char { ready, at_barrier, at_warp, exited };

struct Thread {
  void* stack_pointer;
  uint3 index;
  Place at;
  unsigned mask;
  int source, atomics;
  unsigned long long value;
  unsigned char* stack;  // its lowest byte
  uintptr_t pc;          // of the loop it waits in, where `at` has no line
};

extern Launch launch;
extern Error error;
extern Thread threads[max_threads];
extern int thread_count, current;  // current: the running thread
extern uint64_t block_serial;      // counts blocks over all launches
extern unsigned char* static_shared;
extern size_t static_shared_bytes;

extern uintptr_t module_start, module_end;
extern volatile sig_atomic_t expired;  // the time is over

[[noreturn]] void fail(Kind kind, Place at, uintptr_t pc = 0);
void pause(Place at);  // lets the other threads run

// The checker's part; without checker.cpp they do nothing.
bool checked();
void on_launch();
void on_block();
void on_barrier();
void on_syncwarp(int first_thread, unsigned mask);
void on_fence();
void on_atomic(void* address, unsigned size, Place at, uintptr_t pc);

}  // namespace host
