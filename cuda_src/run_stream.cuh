// Tiles of kTileSteps steps by places (channels, or states of B and C), of which each thread moves one run of
// neighbours along the fast axis: places, or steps where time is the fast axis (kTimeFast). Where the array allows it
// (`vector`) a run is one aligned piece of memory and moves in accesses of up to 16 bytes, asynchronously into slots of
// shared memory that belong to the thread, so that no barrier is needed between the copy and its use.
#pragma once
#include "item_vector.cuh"
#include "selective_args.cuh"
#include "selective_types.cuh"
#include "tile_io.cuh"

constexpr int kTileSteps = kStateInterval;  // a tile has one saved state and one word of marks
static_assert(kTileSteps == kMarkSteps, "a tile's marks are one word");

// A grid of kTileSteps steps by kWidth places over kLanes threads, and which run of kItems of it is a thread's.
template <int kWidth, int kLanes, bool kTimeFast>
struct RunGrid {
  static constexpr int kItems = kTileSteps * kWidth / kLanes;
  static constexpr int kRuns = (kTimeFast ? kTileSteps : kWidth) / kItems;  // in a row along the fast axis
  static constexpr bool kAlongTime = kTimeFast;
  static constexpr unsigned kWhole = kItems < 32 ? (1u << kItems) - 1 : ~0u;  // all items exist
  static_assert(kItems > 0 && kRuns > 0 && kTileSteps * kWidth == kItems * kLanes, "each thread has one run");

  static __device__ __forceinline__ int row(int lane) { return lane / kRuns; }
  static __device__ __forceinline__ int along(int lane, int item) { return lane % kRuns * kItems + item; }
  static __device__ __forceinline__ int time(int lane, int item) { return kTimeFast ? along(lane, item) : row(lane); }
  static __device__ __forceinline__ int place(int lane, int item) { return kTimeFast ? row(lane) : along(lane, item); }

  // Bit i: does item i exist, of the steps from `begin` to before `end` and `width` places? With kPlain all are alike.
  template <bool kPlain>
  static __device__ __forceinline__ unsigned exist(int lane, int begin, int end, int width) {
    if (kPlain) return time(lane, 0) >= begin && time(lane, 0) < end && place(lane, 0) < width ? kWhole : 0;
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i)
      if (time(lane, i) >= begin && time(lane, i) < end && place(lane, i) < width) bits |= 1u << i;
    return bits;
  }
};

// Walks one array, tile by tile. `lane` is the thread among those that share the grid.
template <class Grid, class Item, int kLanes>
struct RunStream {
  static constexpr int kItems = Grid::kItems, kBytes = kItems * sizeof(Item);
  static constexpr int kPiece = kBytes < 16 ? kBytes : 16, kPieces = kBytes / kPiece;
  static constexpr int kTogether = kPiece / (int)sizeof(Item);  // items of a piece
  using Piece = Items<Item, kTogether>;
  using Slots = Piece[kPieces][kLanes];
  char* at;  // this thread's first item in the tile that is next
  long long next, tile_step;

  // `corner`: the item at the first step of the first tile, and place 0.
  __device__ __forceinline__ RunStream(char* corner, long long time_step, long long place_step, int lane)
      : at(corner + Grid::time(lane, 0) * time_step + Grid::place(lane, 0) * place_step),
        next(Grid::kAlongTime ? time_step : place_step),
        tile_step(kTileSteps * time_step) {}
  // `at`: this thread's first item.
  __device__ __forceinline__ RunStream(char* at, long long time_step, long long place_step)
      : at(at), next(Grid::kAlongTime ? time_step : place_step), tile_step(kTileSteps * time_step) {}

  __device__ __forceinline__ bool backwards() const { return Grid::kAlongTime && next < 0; }
  // The run's lowest address.
  __device__ __forceinline__ char* lowest() const { return backwards() ? at + (kItems - 1) * next : at; }

  // Starts the copy of the next tile's run, if it is a vector.
  template <bool kPlain>
  __device__ __forceinline__ void start(Slots& slots, int lane, bool vector, unsigned exist) {
    if ((kPlain || vector) && exist == Grid::kWhole) {
      const char* from = lowest();
#pragma unroll
      for (int i = 0; i < kPieces; ++i) start_copy(&slots[i][lane], from + i * kPiece);
    }
    at += tile_step;
  }

  // Its items, after wait_for_copies; what does not exist is 0. `back` tiles have been started since.
  template <bool kPlain, class R>
  __device__ __forceinline__ void values(const Slots& slots, int lane, bool vector, bool wide, unsigned exist, int back,
                                         R (&to)[kItems]) const {
    if (kPlain || (vector && (exist == Grid::kWhole || !exist))) {
      if (exist) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
          const Piece piece = slots[i][lane];
#pragma unroll
          for (int k = 0; k < kTogether; ++k) to[i * kTogether + k] = piece.get(k);
        }
        if (backwards()) reverse(to);
      } else {
#pragma unroll
        for (int i = 0; i < kItems; ++i) to[i] = Scalar<R>::zero();
      }
    } else {
      load_run<Item>(at - (back + 1) * tile_step, next, exist, wide, to);
    }
  }

  // Rounds and stores a whole run, a vector.
  template <class R>
  __device__ __forceinline__ void store(R (&values)[kItems]) const {
    if (backwards()) reverse(values);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      R together[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) together[k] = values[i * kTogether + k];
      Piece piece;
      piece.set(together);
      *reinterpret_cast<Piece*>(lowest() + i * kPiece) = piece;
    }
  }
};
