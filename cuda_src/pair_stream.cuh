// Grids of steps by channels or states that a block moves in pairs of neighbours: along channels or states, or along
// time where that is the fast axis (kTimeFast). Each thread has the same pairs in every tile, so it walks an array with
// one address, and what exists of a whole tile and of the last one are two bit masks made once.
#pragma once
#include "tile_io.cuh"

// A grid of kSteps steps by kWidth channels or states, and which pairs of it are this thread's. Item 2i is the first of
// pair i, item 2i + 1 its second.
template <int kSteps_, int kWidth, int kThreads, bool kTimeFast>
struct PairGrid {
  static constexpr int kSteps = kSteps_;
  static constexpr bool kAlongTime = kTimeFast;
  static constexpr int kPerRow = (kTimeFast ? kSteps : kWidth) / 2;  // pairs in a row along the fast axis
  static constexpr int kRows = kTimeFast ? kWidth : kSteps;
  static constexpr int kHop = kThreads / kPerRow;  // rows from a thread's pair to its next
  static constexpr int kPairs = (kRows + kHop - 1) / kHop;
  static constexpr int kItems = 2 * kPairs;
  static constexpr bool kEven = kRows % kHop == 0;  // every thread has kPairs pairs
  static_assert(kThreads % kPerRow == 0, "a thread's pairs are whole rows apart");
  static_assert(kItems <= 16, "two masks in a word");

  static __device__ __forceinline__ int row(int item) { return threadIdx.x / kPerRow + item / 2 * kHop; }
  static __device__ __forceinline__ int along(int item) { return 2 * (threadIdx.x % kPerRow) + item % 2; }
  static __device__ __forceinline__ int time(int item) { return kTimeFast ? along(item) : row(item); }
  static __device__ __forceinline__ int place(int item) { return kTimeFast ? row(item) : along(item); }
  static __device__ __forceinline__ bool held(int item) { return kEven || row(item) < kRows; }

  // Bit i: does item i exist in a whole tile, of which `width` channels or states exist; bit 16 + i: in the last one?
  static __device__ __forceinline__ unsigned masks(int last_steps, int width) {
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (!held(i) || place(i) >= width) continue;
      bits |= 1u << i;
      if (time(i) < last_steps) bits |= 1u << (16 + i);
    }
    return bits;
  }
};

// Walks one array, tile by tile: starts the loads of a tile's pairs and, before it starts the next, gives their values.
// The slots in shared memory belong to the thread, so no barrier is needed between the two.
template <class Grid, class Item, int kThreads>
struct PairStream {
  using Slots = Vector<Item>[kThreads];
  char* at;  // this thread's first item in the tile that is next; the lower of its first two where pairs are vectors
  long long hop, next, tile_step;

  // `corner`: the block's item at the first step of its first tile, and place 0.
  __device__ __forceinline__ PairStream(char* corner, long long time_step, long long place_step, bool vector)
      : PairStream(first(corner, time_step, place_step, vector), time_step, place_step) {}
  // `at`: this thread's first item.
  __device__ __forceinline__ PairStream(char* at, long long time_step, long long place_step)
      : at(at),
        hop(Grid::kHop * (Grid::kAlongTime ? place_step : time_step)),
        next(Grid::kAlongTime ? time_step : place_step),
        tile_step(Grid::kSteps * time_step) {}

  static __device__ __forceinline__ char* first(char* corner, long long time_step, long long place_step, bool vector) {
    char* at = corner + Grid::time(0) * time_step + Grid::place(0) * place_step;
    const long long next = Grid::kAlongTime ? time_step : place_step;
    return vector && next < 0 ? at + next : at;
  }

  template <bool kPlain>
  __device__ __forceinline__ void start(Slots* slots, bool vector, unsigned exists) {
    if (kPlain || vector) {
#pragma unroll
      for (int i = 0; i < Grid::kPairs; ++i)
        if (kPlain ? Grid::held(2 * i) : exists >> 2 * i & 1) start_copy(&slots[i][threadIdx.x], at + i * hop);
    }
    at += tile_step;
  }

  // After wait_for_copies. What does not exist is 0.
  template <bool kPlain, class R>
  __device__ __forceinline__ void values(const Slots* slots, bool vector, bool wide, unsigned exists,
                                         R (&to)[Grid::kItems]) const {
    if (kPlain || vector) {
#pragma unroll
      for (int i = 0; i < Grid::kPairs; ++i) {
        to[2 * i] = to[2 * i + 1] = Scalar<R>::zero();
        if (kPlain ? Grid::held(2 * i) : exists >> 2 * i & 1)
          read_vector(&slots[i][threadIdx.x], to[2 * i], to[2 * i + 1]);
      }
      if (Grid::kAlongTime && next < 0) swap_pairs(to);
    } else {
      load_pairs<Item>(at - tile_step, hop, next, exists, wide, to);
    }
  }
};
