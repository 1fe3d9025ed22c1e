// The checked mode: the compiler's ThreadSanitizer and UndefinedBehaviorSanitizer call these hooks before each access,
// and every access that must not happen ends the launch instead.
//
// Bounds and initialisation: each byte that a kernel may touch has a state byte. Races: each granule of four bytes
// keeps its last four accesses as epochs (who, when by his own clock, which bytes), and an access conflicts with an
// unordered one. What orders: a thread's own program; block barriers; __syncwarp among its lanes; and a fence, an
// atomic or volatile write, its value's atomic or volatile read and another fence. Shuffles and votes order nothing
// (CUDA C++ Programming Guide, Warp Shuffle Functions and Warp Vote Functions).
#include <string.h>

#include <unordered_map>
#include <vector>

#include "runtime.h"

namespace host {

struct Epoch {
  uint64_t clock : 40, thread : 10, bytes : 4, write : 1, sync : 1;
  uint32_t block, pc;
};
struct alignas(64) Cell {
  Epoch last[4];
};
static_assert(sizeof(Cell) == 64, "_memory.py allocates 64 bytes a granule");

enum State8 : unsigned char { valid = 1, writable = 2, initialised = 4 };  // the bits of _memory.py

struct Region {  // an Object, or the shared memory
  uintptr_t base;
  size_t size;
  unsigned char* state;
  Cell* cells;
  bool shared;
};

// What a thread knows to be over in a warp, in a block: everything before a barrier, and lanes up to a clock.
struct Knowledge {
  uint32_t block;
  int warp;
  uint64_t barrier, lanes[32];
};
typedef std::vector<Knowledge> Known;

constexpr int phase_shift = 20;  // a clock is the number of barriers passed, then of other ordering operations

static uint64_t phase_clock, phase_stamp;  // the stamp tells phases of all blocks apart
static uint64_t steps[max_threads];        // since the last barrier
static uint64_t seen[max_threads][32], seen_stamp[max_threads];
static Known known[max_threads], acquired[max_threads], known_to_block;
static Knowledge released[max_threads];
static bool has_released[max_threads], any_known;
static std::unordered_map<uintptr_t, Known> published;

static Region dynamic_region, static_region;
static std::vector<Region> regions;
static Region* latest;
static std::vector<unsigned char> shared_state[2];
static std::vector<Cell> shared_cells[2];

static uint64_t clock_of(int thread) { return phase_clock + steps[thread]; }

static uint64_t* seen_by(int thread) {
  if (seen_stamp[thread] != phase_stamp) {
    memset(seen[thread], 0, sizeof seen[thread]);
    seen_stamp[thread] = phase_stamp;
  }
  return seen[thread];
}

static void learn(Known& all, const Knowledge& more) {
  for (Knowledge& each : all) {
    if (each.block != more.block || each.warp != more.warp) continue;
    if (each.barrier < more.barrier) each.barrier = more.barrier;
    for (int i = 0; i < 32; ++i)
      if (each.lanes[i] < more.lanes[i]) each.lanes[i] = more.lanes[i];
    return;
  }
  all.push_back(more);
}

static void learn(Known& all, const Known& more) {
  for (const Knowledge& each : more) learn(all, each);
}

static bool knows(const Known& all, const Epoch& epoch) {
  for (const Knowledge& each : all)
    if (each.block == epoch.block && (epoch.clock < each.barrier || (int(epoch.thread) / 32 == each.warp &&
                                                                     epoch.clock <= each.lanes[epoch.thread % 32])))
      return true;
  return false;
}

static bool ordered(const Epoch& epoch) {
  if (epoch.block == static_cast<uint32_t>(block_serial)) {
    int thread = static_cast<int>(epoch.thread);
    if (thread == current || epoch.clock < phase_clock) return true;
    if (thread / 32 == current / 32 && seen_stamp[current] == phase_stamp && epoch.clock <= seen[current][thread % 32])
      return true;
  }
  return any_known && (knows(known[current], epoch) || knows(known_to_block, epoch));
}

bool checked() { return true; }

// Skewed, or the cells of a column of an array would all fall into the same sets of the cache.
static size_t cell_index(size_t granule) { return granule + granule / 64; }

static Region shared_region(int which, unsigned char* base, size_t size) {
  shared_state[which].assign(size, 0);
  shared_cells[which].assign(cell_index(size / 4 + 2), Cell{});
  return {reinterpret_cast<uintptr_t>(base), size, shared_state[which].data(), shared_cells[which].data(), true};
}

void on_launch() {
  regions.clear();
  for (size_t i = 0; i < launch.object_count; ++i) {
    const Object& each = launch.objects[i];
    regions.push_back({reinterpret_cast<uintptr_t>(each.base), each.size, each.state, each.cells, false});
  }
  latest = nullptr;
  dynamic_region = shared_region(0, cuscan_dynamic_shared, launch.dynamic_bytes);
  static_region = shared_region(1, static_shared, static_shared_bytes);
  published.clear();
  any_known = false;
}

static void forget() {
  known_to_block.clear();
  for (int i = 0; i < thread_count; ++i) {
    known[i].clear();
    acquired[i].clear();
  }
}

static void start_phase(uint64_t clock) {
  phase_clock = clock;
  ++phase_stamp;
  memset(steps, 0, sizeof steps[0] * thread_count);
}

void on_block() {
  for (int i = 0; i < 2; ++i) memset(shared_state[i].data(), valid | writable, shared_state[i].size());
  start_phase(1ull << phase_shift);
  memset(has_released, 0, sizeof has_released);
  if (any_known) forget();
}

void on_barrier() {
  if (any_known) {
    Known all = known_to_block;
    for (int i = 0; i < thread_count; ++i) {
      learn(all, known[i]);
      learn(all, acquired[i]);
    }
    forget();
    known_to_block = all;
  }
  start_phase(phase_clock + (1ull << phase_shift));
}

void on_syncwarp(int first_thread, unsigned mask) {
  uint64_t all[32] = {};
  Known all_known;
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const uint64_t* mine = seen_by(first_thread + lane);
    for (int i = 0; i < 32; ++i)
      if (all[i] < mine[i]) all[i] = mine[i];
    if (any_known) learn(all_known, known[first_thread + lane]);
  }
  for (int lane = 0; lane < 32; ++lane)
    if (mask >> lane & 1) all[lane] = clock_of(first_thread + lane);
  for (int lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    memcpy(seen[first_thread + lane], all, sizeof all);
    ++steps[first_thread + lane];
    if (any_known) known[first_thread + lane] = all_known;
  }
}

void on_fence() {
  learn(known[current], acquired[current]);
  acquired[current].clear();
  Knowledge& mine = released[current];
  mine = {static_cast<uint32_t>(block_serial), current / 32, phase_clock, {}};
  memcpy(mine.lanes, seen_by(current), sizeof mine.lanes);
  mine.lanes[current % 32] = clock_of(current);
  has_released[current] = true;
  ++steps[current];
}

static void synchronise(uintptr_t address, bool read, bool write) {
  auto found = published.find(address);
  if (read && found != published.end()) {
    learn(acquired[current], found->second);
    any_known = true;
  }
  if (!write) return;
  if (!read && found != published.end()) found->second.clear();
  if (!has_released[current]) return;
  Known& all = published[address];
  learn(all, known[current]);
  learn(all, known_to_block);
  learn(all, released[current]);
}

// ---- an access ------------------------------------------------------------------------------------------------

struct Access {
  uintptr_t address;
  size_t size;
  bool read, write, sync;
  uintptr_t pc;
  Place at;
};

[[noreturn]] static void refuse(Kind kind, const Access& access) {
  error.address = access.address;
  error.size = static_cast<unsigned>(access.size);
  error.write = access.write;
  fail(kind, access.at, access.pc);
}

static Region* find(uintptr_t address) {
  if (latest && address - latest->base < latest->size) return latest;
  size_t low = 0, high = regions.size();
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (regions[middle].base <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low && address - regions[low - 1].base < regions[low - 1].size ? latest = &regions[low - 1] : nullptr;
}

// Accesses of blocks before `since` do not count: those of earlier launches and, in shared memory, of earlier blocks.
static void touch(Cell& cell, const Epoch& now, const Access& access, uint32_t since) {
  Epoch* free = nullptr;
  int best = 0;
  for (Epoch& each : cell.last) {
    bool stale = each.block < since;
    bool before = stale || ordered(each);
    if (!before && each.bytes & now.bytes && (each.write || now.write) && !(each.sync && now.sync)) {
      error.other = static_cast<int>(each.thread);
      error.other_block = each.block - static_cast<uint32_t>(block_serial);
      error.other_pc = each.pc;
      refuse(race, access);
    }
    // What a later thread could race with must stay: a read replaces no write.
    bool covered = before && !(each.bytes & ~now.bytes) && (now.write || !each.write);
    int worth = stale ? 4 : covered ? 3 : before && !each.write ? 2 : !each.write ? 1 : 0;
    if (worth > best) {
      best = worth;
      free = &each;
    }
  }
  if (free)
    *free = now;
  else if (now.write)
    cell.last[current % 4] = now;
}

// The bits that all bytes of a word have.
template <class Word>
static unsigned char common(const unsigned char* bytes) {
  Word word;
  memcpy(&word, bytes, sizeof word);
  for (unsigned half = sizeof word * 4; half >= 8; half /= 2) word &= word >> half;
  return static_cast<unsigned char>(word);
}

static void check_region(Region& region, const Access& access) {
  size_t offset = access.address - region.base;
  if (offset + access.size > region.size) refuse(out_of_bounds, access);
  unsigned char* state = region.state + offset;
  unsigned char all = access.size == 4 ? common<uint32_t>(state) : access.size == 8 ? common<uint64_t>(state) : *state;
  if (access.size != 4 && access.size != 8)
    for (size_t i = 1; i < access.size; ++i) all &= state[i];
  if (!(all & valid)) refuse(out_of_bounds, access);
  if (access.write && !(all & writable)) refuse(read_only, access);
  if (access.read && !(all & initialised)) {
    Access reading = access;
    reading.write = false;
    refuse(uninitialised, reading);
  }
  if (region.cells) {
    Epoch now = {};
    now.clock = clock_of(current);
    now.thread = static_cast<unsigned>(current);
    now.write = access.write;
    now.sync = access.sync;
    now.block = static_cast<uint32_t>(block_serial);
    now.pc = access.pc ? static_cast<uint32_t>(access.pc - module_start) : 0;
    uint32_t since = static_cast<uint32_t>(region.shared ? block_serial : launch.first_block);
    uintptr_t base = region.base / 4, end = access.address + access.size;
    for (uintptr_t i = access.address / 4; i <= (end - 1) / 4; ++i) {
      unsigned bytes = 0xf;
      if (i * 4 < access.address) bytes &= 0xf << (access.address - i * 4);
      if (i * 4 + 4 > end) bytes &= 0xf >> (i * 4 + 4 - end);
      now.bytes = bytes & 0xf;
      touch(region.cells[cell_index(i - base)], now, access, since);
    }
  }
  if (access.write && !(all & initialised))
    for (size_t i = 0; i < access.size; ++i) state[i] |= initialised;
}

static void check(const Access& access) {
  uintptr_t address = access.address;
  if (address - reinterpret_cast<uintptr_t>(threads[current].stack) < launch.stack_bytes) return;
  if (expired) fail(timed_out, access.at, access.pc);
  if (address - dynamic_region.base < max_dynamic) return check_region(dynamic_region, access);
  if (address - static_region.base < static_region.size) return check_region(static_region, access);
  if (Region* region = find(address)) return check_region(*region, access);
  if (address >= module_start && address + access.size <= module_end) return;  // constants and __device__ variables
  refuse(out_of_bounds, access);
}

void on_atomic(void* pointer, unsigned size, Place at, uintptr_t pc) {
  uintptr_t address = reinterpret_cast<uintptr_t>(pointer);
  Access access = {address, size, true, true, true, pc, at};
  if (address % size) refuse(misaligned, access);
  check(access);
  synchronise(address, true, true);
}

static void on_volatile(uintptr_t address, size_t size, bool write, uintptr_t pc) {
  // A loop that waits for a flag lets the others run.
  if (!write && ++threads[current].atomics % 64 == 0) {
    threads[current].pc = pc - module_start;
    pause({"a loop of volatile reads", "", 0});
  }
  check({address, size, !write, write, true, pc, {"", "", 0}});
  synchronise(address, !write, write);
}

}  // namespace host

using namespace host;

#define PC reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define HOOK extern "C" void
#define PLAIN(name, size, write)                                                                  \
  HOOK name(void* address) {                                                                      \
    check({reinterpret_cast<uintptr_t>(address), size, !(write), write, false, PC, {"", "", 0}}); \
  }
#define VOLATILE(name, size, write) \
  HOOK name(void* address) { on_volatile(reinterpret_cast<uintptr_t>(address), size, write, PC); }
#define HOOKS(size)                                           \
  PLAIN(__tsan_read##size, size, false)                       \
  PLAIN(__tsan_write##size, size, true)                       \
  PLAIN(__tsan_unaligned_read##size, size, false)             \
  PLAIN(__tsan_unaligned_write##size, size, true)             \
  VOLATILE(__tsan_volatile_read##size, size, false)           \
  VOLATILE(__tsan_volatile_write##size, size, true)           \
  VOLATILE(__tsan_unaligned_volatile_read##size, size, false) \
  VOLATILE(__tsan_unaligned_volatile_write##size, size, true)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

HOOK __tsan_init() {}
HOOK __tsan_func_exit() {}
HOOK __tsan_func_entry(void*) {
  uintptr_t here = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  uintptr_t left = here - reinterpret_cast<uintptr_t>(threads[current].stack);
  if (left < 32768) fail(stack_overflow, {"", "", 0}, PC);
}
HOOK __tsan_read_range(void* address, size_t size) {
  check({reinterpret_cast<uintptr_t>(address), size, true, false, false, PC, {"", "", 0}});
}
HOOK __tsan_write_range(void* address, size_t size) {
  check({reinterpret_cast<uintptr_t>(address), size, false, true, false, PC, {"", "", 0}});
}
extern "C" void* __tsan_memcpy(void* to, const void* from, size_t size) {
  check({reinterpret_cast<uintptr_t>(from), size, true, false, false, PC, {"", "", 0}});
  check({reinterpret_cast<uintptr_t>(to), size, false, true, false, PC, {"", "", 0}});
  return memmove(to, from, size);
}
extern "C" void* __tsan_memset(void* to, int value, size_t size) {
  check({reinterpret_cast<uintptr_t>(to), size, false, true, false, PC, {"", "", 0}});
  return memset(to, value, size);
}

// The data of the compiler's undefined-behaviour checks, as far as it is read here.
struct Source {
  const char* file;
  unsigned line, column;
};
struct TypeMismatch {
  Source source;
  void* type;
  unsigned char log_alignment, kind;
};

HOOK __ubsan_handle_type_mismatch_v1(TypeMismatch* data, uintptr_t address) {
  error.address = address;
  error.size = 1u << data->log_alignment;
  fail(misaligned, {"", data->source.file, static_cast<int>(data->source.line)});
}
HOOK __ubsan_handle_out_of_bounds(Source* source, uintptr_t index) {
  error.address = index;
  error.size = 0;
  fail(out_of_bounds, {"", source->file, static_cast<int>(source->line)});
}
HOOK __ubsan_handle_divrem_overflow(Source* source, uintptr_t, uintptr_t) {
  fail(division, {"", source->file, static_cast<int>(source->line)});
}
