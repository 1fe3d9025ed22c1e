// A split in one pass: ordered look-back in fixed groups.
//
// Each block takes the next ticket of the launch, a tile of some row; tiles of lower tickets have been started before,
// so waiting for them ends. A block that has folded its tile publishes the map, and the last block of a group of
// kGroup tiles the state that leaves the group. What enters a tile is then the state that left the group before, and
// the fold of the maps of the group's tiles before it: the same association every time, whichever block came first.
// Only the states of groups are a chain, of one hop in kGroup tiles.
//
// Scratch, zeroed by a launch before (clear_cells): the ticket, then cells of 8 bytes, which the chip writes at once. A
// cell is 4 bytes of a map or state, and above them a flag: 0 where nothing was published yet, else 1. So no cell needs
// another to be seen first. Word w of the maps of tile k of row r is
//   maps + w * (rows * chunks) + place(r, k), and place(r, k) is k * rows + r over rows, r * chunks + k over time;
// behind them the states of the groups, in the same way.
#pragma once
#include "linear_tile.cuh"

using Cell = unsigned long long;

__device__ __forceinline__ Cell load_cell(const Cell* cell) {
#ifdef __CUDA_ARCH__
  Cell value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(cell) : "memory");
  return value;
#else
  return *reinterpret_cast<const volatile Cell*>(cell);
#endif
}
__device__ __forceinline__ void store_cell(Cell* cell, Cell value) {
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(cell), "l"(value) : "memory");
#else
  *reinterpret_cast<volatile Cell*>(cell) = value;
#endif
}

// Values of kWords 4-byte words, word w of value i in cell w * apart + i.
template <class V>
struct Cells {
  static constexpr int kWords = sizeof(V) / 4;
  Cell* first;
  long long apart;

  __device__ __forceinline__ void publish(long long i, V value) const {
    const unsigned* words = reinterpret_cast<const unsigned*>(&value);
#pragma unroll
    for (int w = 0; w < kWords; ++w) store_cell(first + w * apart + i, 1ull << 32 | words[w]);
  }
};

// A value on its way from its cells.
template <class V>
struct Arriving {
  static constexpr int kWords = Cells<V>::kWords;
  Cell cell[kWords];

  // Looks once. Is all of it there?
  __device__ __forceinline__ void look(const Cells<V>& cells, long long i) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) cell[w] = load_cell(cells.first + w * cells.apart + i);
  }
  __device__ __forceinline__ bool whole() const {
    bool all = true;
#pragma unroll
    for (int w = 0; w < kWords; ++w) all &= cell[w] >> 32 != 0;
    return all;
  }
  __device__ __forceinline__ V value() const {
    V value;
    unsigned* words = reinterpret_cast<unsigned*>(&value);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = (unsigned)cell[w];
    return value;
  }
};

// Tiles that a lane over time, or a warp over rows, looks at: their loads are under way together.
constexpr int kLooks = 4;

template <class Map, bool kOverRows>
struct LookBack {
  using S = typename Map::State;
  Cells<Affine<S>> maps;
  Cells<S> states;
  long long rows, chunks, groups;
  int group;  // tiles

  __device__ __forceinline__ LookBack(const LinearArgs& args) : rows(args.rows), chunks(args.chunks) {
    group = (kOverRows ? args.row_warps : 32) * kLooks;
    groups = (chunks + group - 1) / group;
    maps = {reinterpret_cast<Cell*>(args.cells) + 2, rows * chunks};
    states = {maps.first + maps.kWords * maps.apart, rows * groups};
  }
  __device__ __forceinline__ void publish(long long row, long long chunk, Map map) const {
    maps.publish(map_place(row, chunk), map);
  }
  // `state` is what leaves the tile: of interest if it is the last of a group and not of the row.
  __device__ __forceinline__ void publish_state(long long row, long long chunk, S state) const {
    if (chunk % group == group - 1 && chunk + 1 < chunks) states.publish(state_place(row, chunk / group), state);
  }
  __device__ __forceinline__ long long state_place(long long row, long long number) const {
    return kOverRows ? number * rows + row : row * groups + number;
  }

  __device__ __forceinline__ long long map_place(long long row, long long chunk) const {
    return kOverRows ? chunk * rows + row : row * chunks + chunk;
  }

  // The fold of `first` to `first` + kLooks - 1 of the tiles of a group, of those before `chunk`, the only ones if
  // there are any; and a first look at the state that enters the group. `chunk` is not the first of its group. All
  // loads are under way at once: at a branch the chip would wait for them, so whoever has less to look at looks again.
  __device__ __forceinline__ Map maps_before(long long row, long long chunk, int first, Arriving<S>& state) const {
    const int before = (int)(chunk % group);
    const long long begin = chunk - before;
    Arriving<Affine<S>> map[kLooks];
    bool all;
    do {
#pragma unroll
      for (int i = 0; i < kLooks; ++i)
        map[i].look(maps, map_place(row, begin + (first + i < before ? first + i : before - 1)));
      state.look(begin > 0 ? states : Cells<S>{maps.first, maps.apart},
                 begin > 0 ? state_place(row, begin / group - 1) : map_place(row, begin));
      all = true;
#pragma unroll
      for (int i = 0; i < kLooks; ++i) all &= map[i].whole();
    } while (!all);
    Map fold = Map::identity();
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      if (first + i < before) fold = i == 0 ? map[i].value() : combine(fold, map[i].value());
    }
    return fold;
  }
  // The state that enters a tile, in every lane of a warp; `state` enters the first group.
  __device__ __forceinline__ S enters_over_time(long long row, long long chunk, int lane, S state) const {
    const int before = (int)(chunk % group);
    Arriving<S> arriving = {};
    Map fold;
    if (before > 0) {
      fold = maps_before(row, chunk, lane * kLooks, arriving);
      fold = from_lane(warp_inclusive_scan(fold, lane), (before - 1) / kLooks);
    }
    if (chunk >= group) state = state_before(row, chunk, arriving);
    return before > 0 ? apply(fold, state) : state;
  }
  // The state that enters the group of `chunk`, not the first one.
  __device__ __forceinline__ S state_before(long long row, long long chunk, Arriving<S>& state) const {
    while (!state.whole()) state.look(states, state_place(row, chunk / group - 1));
    return state.value();
  }
};

// The fold of `count` maps that are `stride` apart.
template <class Map>
__device__ __forceinline__ Map fold_of(const Map* parts, int stride, int count) {
  Map fold = parts[0];
  for (int i = 1; i < count; ++i) fold = combine(fold, parts[i * stride]);
  return fold;
}

__device__ __forceinline__ long long take_ticket(const LinearArgs& args) {
  return (long long)atomicAdd(reinterpret_cast<Cell*>(args.cells), 1ull);
}
// A block's first.
__device__ __forceinline__ long long first_ticket(const LinearArgs& args) {
  __shared__ long long first;
  if (threadIdx.x == 0) first = take_ticket(args);
  __syncthreads();
  return first;
}

__device__ __forceinline__ void clear_cells(const LinearArgs& args) {
  struct alignas(16) Two {
    Cell first, second;
  };
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < args.cell_pairs;
       i += (long long)gridDim.x * blockDim.x)
    reinterpret_cast<Two*>(args.cells)[i] = {0, 0};
}
