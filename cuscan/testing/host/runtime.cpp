// Runs a kernel: its threads are fibers of one operating-system thread, its blocks follow each other in index order.
//
// A fiber runs until it waits (barrier, shuffle, vote) and goes on when everyone it waits for has arrived. Whoever
// arrives last completes the operation for all. When no thread can run and some have not exited, somebody waits
// for a thread that never comes: that is a divergence (it exited) or a deadlock (it waits for something else).
#include "runtime.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

extern "C" {
uint3 threadIdx, blockIdx, blockDim, gridDim;  // const in the kernel's eyes
alignas(1024) unsigned char cuscan_dynamic_shared[host::max_dynamic];
}

// ---- the switch: callee-saved registers on the stack, then the other stack ----------------------------------
// It ends in a jump: a return would be predicted to go where this stack was left from, and always wrongly.

extern "C" void cuscan_switch(void** save, void* load);
#if defined(__x86_64__)
asm(R"(
.text
.hidden cuscan_switch
.globl cuscan_switch
.type cuscan_switch, @function
cuscan_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    popq %rdx
    jmp *%rdx
.size cuscan_switch, .-cuscan_switch
)");
constexpr int frame_words = 8, frame_return = 6;  // six registers, the return address, a word that aligns the stack
#elif defined(__aarch64__)
asm(R"(
.text
.hidden cuscan_switch
.globl cuscan_switch
.type cuscan_switch, %function
cuscan_switch:
    stp x29, x30, [sp, -160]!
    stp x19, x20, [sp, 16]
    stp x21, x22, [sp, 32]
    stp x23, x24, [sp, 48]
    stp x25, x26, [sp, 64]
    stp x27, x28, [sp, 80]
    stp d8, d9, [sp, 96]
    stp d10, d11, [sp, 112]
    stp d12, d13, [sp, 128]
    stp d14, d15, [sp, 144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, 16]
    ldp x21, x22, [sp, 32]
    ldp x23, x24, [sp, 48]
    ldp x25, x26, [sp, 64]
    ldp x27, x28, [sp, 80]
    ldp d8, d9, [sp, 96]
    ldp d10, d11, [sp, 112]
    ldp d12, d13, [sp, 128]
    ldp d14, d15, [sp, 144]
    ldp x29, x30, [sp], 160
    br x30
.size cuscan_switch, .-cuscan_switch
)");
constexpr int frame_words = 20, frame_return = 1;
#else
#error "the switch between fibers is written for x86-64 and aarch64"
#endif

namespace host {

volatile sig_atomic_t expired;  // the time is over
Launch launch;
Error error;
Thread threads[max_threads];
int thread_count, current;
uint64_t block_serial;
unsigned char* static_shared;
size_t static_shared_bytes;
uintptr_t module_start, module_end;

static State state[max_threads];
static void* scheduler;
static bool in_fiber;
static int order[max_threads];
static uint64_t random_state;

struct Group {  // lanes of a warp that wait for each other
  unsigned mask, arrived;
  Place at;
};
struct Warp {
  Group groups[32];
  int group_count;
};
static Warp warps[max_threads / 32];
static int barrier_arrived, barrier_sum, barrier_result;
static int barrier_first;  // a thread that waits there
static bool paused;        // the last fiber that ran gave way, and does not wait
static int idle;           // how often that has happened since something else did

__attribute__((weak)) bool checked() { return false; }
__attribute__((weak)) void on_launch() {}
__attribute__((weak)) void on_block() {}
__attribute__((weak)) void on_barrier() {}
__attribute__((weak)) void on_syncwarp(int, unsigned) {}
__attribute__((weak)) void on_fence() {}
__attribute__((weak)) void on_atomic(void*, unsigned, Place, uintptr_t) {}

static void to_scheduler() { cuscan_switch(&threads[current].stack_pointer, scheduler); }

// Leaves the launch: the fibers are abandoned where they stand.
void fail(Kind kind, Place at, uintptr_t pc) {
  error.kind = kind;
  error.thread = current;
  error.block = blockIdx;
  error.at = at;
  error.pc = pc ? pc - module_start : 0;
  to_scheduler();
  __builtin_unreachable();
}

void pause(Place at) {
  threads[current].at = at;
  paused = true;
  to_scheduler();
}

static bool same(const char* a, const char* b) { return a == b || !strcmp(a, b); }
static bool same(const Place& a, const Place& b) {
  return a.line == b.line && same(a.op, b.op) && same(a.file, b.file);
}

static inline void wait(State why, const Place& at) {
  threads[current].at = at;
  state[current] = why;
  to_scheduler();
}

[[noreturn]] static void diverge(int other, const Place& at) {
  error.other = other;
  error.other_at = threads[other].at;
  fail(divergence, at);
}

// ---- warp collectives ----------------------------------------------------------------------------------------

enum Result { exchange, vote, order_memory };

static void complete(Warp& warp, Group& group, Result result, int first_thread) {
  unsigned long long values[32];
  unsigned votes = 0, arrived = group.arrived;
  Place at = group.at;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    values[lane] = threads[first_thread + lane].value;
    votes |= static_cast<unsigned>(values[lane] & 1) << lane;
  }
  for (int lane = 0; lane < 32; ++lane) {
    if (!(arrived >> lane & 1)) continue;
    Thread& thread = threads[first_thread + lane];
    if (result == exchange && !(arrived >> thread.source & 1)) {
      current = first_thread + lane;
      error.other = first_thread + thread.source;
      fail(bad_mask, at);
    }
    thread.value = result == exchange ? values[thread.source] : votes;
    state[first_thread + lane] = ready;
  }
  if (result == order_memory) on_syncwarp(first_thread, arrived);
  group = warp.groups[--warp.group_count];
}

// Inlined, since the returns that follow a switch are predicted wrongly.
__attribute__((always_inline)) static inline unsigned long long collective(Result result, unsigned mask,
                                                                           unsigned long long value, int source,
                                                                           const Place& at) {
  Thread& thread = threads[current];
  int lane = current % 32, first_thread = current - lane, mine = current;
  Warp& warp = warps[current / 32];
  unsigned bit = 1u << lane;
  thread.mask = mask;
  thread.value = value;
  thread.source = source;
  thread.atomics = 0;
  error.other = -1;
  if (!(mask & bit)) fail(bad_mask, at);
  // Two threads that wait for each other in different places never meet.
  if (barrier_arrived)
    for (int other = 0; other < 32; ++other)
      if (mask >> other & 1 && state[first_thread + other] == at_barrier) diverge(first_thread + other, at);
  Group* group = nullptr;
  for (int i = 0; i < warp.group_count; ++i) {
    Group& each = warp.groups[i];
    if (each.mask == mask && same(each.at, at))
      group = &each;
    else if (each.arrived & mask && each.mask & bit)
      diverge(first_thread + __builtin_ctz(each.arrived & mask), at);
  }
  if (!group) {
    group = &warp.groups[warp.group_count++];
    *group = {mask, 0, at};
  }
  group->arrived |= bit;
  if (group->arrived == mask)
    complete(warp, *group, result, first_thread);
  else
    wait(at_warp, at);
  return threads[mine].value;
}

static inline int barrier(int predicate, const Place& at) {
  Warp& warp = warps[current / 32];
  threads[current].atomics = 0;
  for (int i = 0; i < warp.group_count; ++i)
    if (warp.groups[i].mask >> current % 32 & 1) diverge(current / 32 * 32 + __builtin_ctz(warp.groups[i].arrived), at);
  if (barrier_arrived && !same(threads[barrier_first].at, at)) diverge(barrier_first, at);
  barrier_sum += predicate;
  barrier_first = current;
  if (++barrier_arrived < thread_count) {
    wait(at_barrier, at);
    return barrier_result;
  }
  on_barrier();
  memset(state, ready, thread_count);
  barrier_result = barrier_sum;
  barrier_arrived = barrier_sum = 0;
  return barrier_result;
}

// ---- the scheduler -------------------------------------------------------------------------------------------

static void fiber() {
  launch.entry->call(launch.arguments);
  state[current] = exited;
  to_scheduler();
}

static uint64_t random_below(uint64_t n) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return (random_state >> 11) % n;
}

static void shuffle_order() {
  for (int i = thread_count - 1; i > 0; --i) {
    int j = static_cast<int>(random_below(i + 1)), kept = order[i];
    order[i] = order[j];
    order[j] = kept;
  }
}

static void start_block() {
  if (static_shared_bytes) memset(static_shared, 0xff, static_shared_bytes);
  memset(cuscan_dynamic_shared, 0xff, launch.dynamic_bytes);
  memset(state, ready, thread_count);
  barrier_arrived = barrier_sum = 0;
  for (int i = 0; i < (thread_count + 31) / 32; ++i) warps[i].group_count = 0;
  for (int i = 0; i < thread_count; ++i) {
    unsigned x = blockDim.x, y = blockDim.y, t = static_cast<unsigned>(i);
    Thread& thread = threads[i];
    thread.index = {t % x, t / x % y, t / (x * y)};
    thread.atomics = 0;
    thread.at = {"", "", 0};
    thread.pc = 0;
    thread.stack = launch.stacks + static_cast<size_t>(launch.stack_bytes) * i;
    // The tops are spread, or all stacks fall into the same sets of the cache.
    void** top = reinterpret_cast<void**>(thread.stack + launch.stack_bytes - i % 64 * 1088);
    void** frame = top - frame_words;
    memset(frame, 0, frame_words * sizeof(void*));
    frame[frame_return] = reinterpret_cast<void*>(fiber);
    thread.stack_pointer = frame;
  }
  on_block();
}

// No thread gets on. Blames a thread that waits for one that has exited or, if there is none, any.
static void stuck() {
  int blamed = -1;
  error.kind = deadlock;
  for (int i = 0; i < thread_count; ++i) {
    if (state[i] == exited || state[i] == ready) continue;
    unsigned char missing[max_threads] = {};
    bool exits = false;
    int first = state[i] == at_barrier ? 0 : i / 32 * 32;
    int last = state[i] == at_barrier ? thread_count : first + 32;
    for (int j = first; j < last; ++j) {
      if (state[i] == at_warp && !(threads[i].mask >> (j - first) & 1)) continue;
      bool together = j < thread_count && state[j] == state[i] && same(threads[j].at, threads[i].at) &&
                      (state[i] == at_barrier || threads[j].mask == threads[i].mask);
      if (together) continue;
      missing[j] = j >= thread_count ? 3 : state[j] == exited ? 1 : 2;
      exits |= missing[j] != 2;
    }
    if (blamed >= 0 && !exits) continue;
    blamed = i;
    memcpy(error.missing, missing, sizeof missing);
    error.kind = exits ? divergence : deadlock;
    if (exits) break;
  }
  for (int i = 0; blamed < 0; ++i)
    if (state[i] == ready) blamed = i;  // nobody waits for others: all wait in loops of their own
  error.thread = blamed;
  error.other = -1;
  error.block = blockIdx;
  error.at = threads[blamed].at;
  error.pc = threads[blamed].pc;
}

static void time_is_over() {
  error.kind = timed_out;
  error.thread = current;
  error.block = blockIdx;
  error.at = threads[current].at;
  error.pc = threads[current].pc;
}

// Runs the threads order[first:last] until they wait or give way. Whether one of them got on.
static bool run(int first, int last) {
  bool moved = false;
  for (int i = first; i < last; ++i) {
    int each = order[i];
    if (state[each] != ready) continue;
    current = each;
    threadIdx = threads[each].index;
    paused = false;
    in_fiber = true;
    cuscan_switch(&scheduler, threads[each].stack_pointer);
    in_fiber = false;
    if (expired && !error.kind) time_is_over();
    if (error.kind) return false;
    moved |= !paused;
    idle = paused ? idle + 1 : 0;
  }
  return moved;
}

static void run_block() {
  start_block();
  for (int i = 0; i < thread_count; ++i) order[i] = launch.order == 1 ? thread_count - 1 - i : i;
  for (idle = 0; idle < 200000;) {
    int left = 0;
    bool can_run = false;
    for (int i = 0; i < thread_count; ++i) {
      left += state[i] != exited;
      can_run |= state[i] == ready;
    }
    if (!left) return;
    if (!can_run) break;
    if (launch.order == 2) {
      shuffle_order();
      run(0, thread_count);
    }
    // A warp goes on as far as it can: its stacks stay in the cache.
    for (int first = 0; launch.order != 2 && !error.kind && first < thread_count; first += 32)
      while (run(first, first + 32 < thread_count ? first + 32 : thread_count)) {
      }
    if (error.kind) return;
  }
  stuck();
}

// ---- floating point as CuPy compiles it: subnormals are zero ------------------------------------------------

#if defined(__x86_64__)
static uint64_t flush() {
  unsigned old = _mm_getcsr();
  _mm_setcsr(old | 0x8040);
  return old;
}
static void restore(uint64_t old) { _mm_setcsr(static_cast<unsigned>(old)); }
#else
static uint64_t flush() {
  uint64_t old;
  asm volatile("mrs %0, fpcr" : "=r"(old));
  asm volatile("msr fpcr, %0" ::"r"(old | 1u << 24));
  return old;
}
static void restore(uint64_t old) { asm volatile("msr fpcr, %0" ::"r"(old)); }
#endif

// ---- signals: a crash or an endless loop ends the launch, not the interpreter -------------------------------

static pid_t launching_thread;
constexpr int signals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};
static struct sigaction old_actions[5];

static void on_signal(int number, siginfo_t* info, void* context) {
  // The checker may hold a lock of malloc's: it is asked first, and has a second to look.
  if (number == SIGVTALRM && !expired++ && checked()) return;
  if (gettid() != launching_thread || !in_fiber) {
    if (number != SIGVTALRM) signal(number, SIG_DFL);
    return;
  }
  ucontext_t* registers = static_cast<ucontext_t*>(context);
#if defined(__x86_64__)
  uintptr_t pc = static_cast<uintptr_t>(registers->uc_mcontext.gregs[REG_RIP]);
#else
  uintptr_t pc = registers->uc_mcontext.pc;
#endif
  error.address = reinterpret_cast<uintptr_t>(info->si_addr);
  bool known = pc >= module_start && pc < module_end;
  fail(number == SIGVTALRM ? timed_out : crashed, {"", "", 0}, known ? pc + 1 : 0);
}

struct Guard {
  stack_t old_stack;
  timer_t timer;
  alignas(16) char stack[32768];
  Guard() {
    stack_t mine = {stack, 0, sizeof stack};
    sigaltstack(&mine, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 5; ++i) sigaction(signals[i], &action, &old_actions[i]);
    launching_thread = gettid();
    expired = 0;
    sigevent event = {};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = SIGVTALRM;
    event._sigev_un._tid = launching_thread;
    timer_create(CLOCK_MONOTONIC, &event, &timer);
    time_t seconds = static_cast<time_t>(launch.timeout);
    itimerspec when = {{1, 0}, {seconds, static_cast<long>((launch.timeout - seconds) * 1e9)}};
    timer_settime(timer, 0, &when, nullptr);
  }
  ~Guard() {
    timer_delete(timer);
    for (int i = 0; i < 5; ++i) sigaction(signals[i], &old_actions[i], nullptr);
    sigaltstack(&old_stack, nullptr);
  }
};

// ---- static shared memory is the library's thread-local segment ----------------------------------------------

extern "C" void* __tls_get_addr(size_t* module_and_offset);

static int find_segment(dl_phdr_info* info, size_t, void*) {
  uintptr_t here = reinterpret_cast<uintptr_t>(&find_segment);
  const ElfW(Phdr)* thread_local_segment = nullptr;
  bool mine = false;
  uintptr_t end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const ElfW(Phdr) & segment = info->dlpi_phdr[i];
    uintptr_t start = info->dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_LOAD && here >= start && here < start + segment.p_memsz) mine = true;
    if (segment.p_type == PT_LOAD) end = start + segment.p_memsz;
    if (segment.p_type == PT_TLS) thread_local_segment = &segment;
  }
  if (!mine) return 0;
  module_start = info->dlpi_addr;
  module_end = end;
  if (thread_local_segment) {
    size_t index[2] = {info->dlpi_tls_modid, 0};
    static_shared = static_cast<unsigned char*>(__tls_get_addr(index));
    static_shared_bytes = thread_local_segment->p_memsz;
  }
  return 1;
}

}  // namespace host

using namespace host;

extern "C" {

unsigned long long cuscan_exchange(const char* op, unsigned mask, unsigned long long value, int source,
                                   const char* file, int line) {
  return collective(exchange, mask, value, source, {op, file, line});
}
unsigned cuscan_ballot(const char* op, unsigned mask, int predicate, const char* file, int line) {
  return static_cast<unsigned>(collective(vote, mask, static_cast<unsigned>(predicate), 0, {op, file, line}));
}
void cuscan_syncwarp(unsigned mask, const char* file, int line) {
  collective(order_memory, mask, 0, 0, {"__syncwarp", file, line});
}
int cuscan_barrier(const char* op, int predicate, const char* file, int line) {
  return barrier(predicate, {op, file, line});
}
void cuscan_atomic(void* address, unsigned size, const char* file, int line) {
  if (++threads[current].atomics % 64 == 0) pause({"atomic", file, line});  // it may be waiting for a flag
  on_atomic(address, size, {"atomic", file, line}, reinterpret_cast<uintptr_t>(__builtin_return_address(0)));
}
void cuscan_fence() { on_fence(); }
void cuscan_pause(const char* file, int line) { pause({"__nanosleep", file, line}); }
void cuscan_bad_width(const char* op, int, const char* file, int line) {
  error.other = -2;
  fail(bad_mask, {op, file, line});
}
void cuscan_trap(const char* file, int line) { fail(trapped, {"__trap", file, line}); }

// Of libgcov, in a library that counts lines.
__attribute__((weak)) void __gcov_dump();
__attribute__((weak)) void __gcov_reset();
__attribute__((visibility("default"))) void cuscan_write_counters(const char* folder) {
  setenv("GCOV_PREFIX", folder, 1);
  __gcov_dump();
  __gcov_reset();
  unsetenv("GCOV_PREFIX");
}

__attribute__((visibility("default"))) void cuscan_launch(const Launch* request, Error* result) {
  launch = *request;
  memset(&error, 0, sizeof error);
  static_shared = nullptr;
  static_shared_bytes = 0;
  dl_iterate_phdr(find_segment, nullptr);
  blockDim = launch.block;
  gridDim = launch.grid;
  thread_count = static_cast<int>(blockDim.x * blockDim.y * blockDim.z);
  random_state = launch.seed * 0x9e3779b97f4a7c15u + 0x2545f4914f6cdd1du;
  block_serial = launch.first_block;
  on_launch();
  Guard guard;
  uint64_t old = flush();
  for (unsigned z = 0; z < gridDim.z; ++z)
    for (unsigned y = 0; y < gridDim.y; ++y)
      for (unsigned x = 0; x < gridDim.x && !error.kind; ++x) {
        blockIdx = {x, y, z};
        run_block();
        ++block_serial;
      }
  restore(old);
  *result = error;
}
}
