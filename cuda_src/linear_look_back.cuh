// A split in one pass: ordered look-back in fixed groups.
//
// Each block takes the next ticket of the launch, a tile of some row; tiles of lower tickets have been started before,
// so waiting for them ends. A block that has folded its tile publishes the map, and the last block of a group of
// tiles the state that leaves the group. What enters a tile is then the state that left the group before, and the fold
// of the maps of the group's tiles before it: the same association every time, whichever block came first. Only the
// states of groups are a chain, of one hop a group.
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
  // The value, when all of it is there.
  __device__ __forceinline__ V wait_for(long long i) const {
    V value;
    unsigned* words = reinterpret_cast<unsigned*>(&value);
    bool whole;
    do {
      whole = true;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        const Cell cell = load_cell(first + w * apart + i);
        words[w] = (unsigned)cell;
        whole &= cell >> 32 != 0;
      }
    } while (!whole);
    return value;
  }
};

// A group has a tile for each lane over time, or for each warp of a block over rows.
template <class Map, bool kOverRows>
struct LookBack {
  using S = typename Map::State;
  Cells<Affine<S>> maps;
  Cells<S> states;
  long long rows, chunks;
  int group;  // tiles

  __device__ __forceinline__ LookBack(const LinearArgs& args)
      : rows(args.rows), chunks(args.chunks), group(kOverRows ? args.row_warps : 32) {
    maps = {reinterpret_cast<Cell*>(args.cells) + 2, rows * chunks};
    states = {maps.first + maps.kWords * maps.apart, rows * groups()};
  }
  __device__ __forceinline__ long long groups() const { return (chunks + group - 1) / group; }
  __device__ __forceinline__ long long map_place(long long row, long long chunk) const {
    return kOverRows ? chunk * rows + row : row * chunks + chunk;
  }
  __device__ __forceinline__ long long state_place(long long row, long long number) const {
    return kOverRows ? number * rows + row : row * groups() + number;
  }

  __device__ __forceinline__ void publish(long long row, long long chunk, Map map) const {
    maps.publish(map_place(row, chunk), map);
  }
  // `state` is what leaves the tile: of interest if it is the last of a group and not of the row.
  __device__ __forceinline__ void publish_state(long long row, long long chunk, S state) const {
    if (chunk % group == group - 1 && chunk + 1 < chunks) states.publish(state_place(row, chunk / group), state);
  }

  // How many tiles of its group are before a tile; the map of one of them; and the state that enters the group, not the
  // first one.
  __device__ __forceinline__ int tiles_before(long long chunk) const { return (int)(chunk % group); }
  __device__ __forceinline__ Map map_before(long long row, long long chunk, int number) const {
    return maps.wait_for(map_place(row, chunk - tiles_before(chunk) + number));
  }
  __device__ __forceinline__ S state_before(long long row, long long chunk) const {
    return states.wait_for(state_place(row, chunk / group - 1));
  }
};

// The fold of `count` maps that are `stride` apart.
template <class Map>
__device__ __forceinline__ Map fold_of(const Map* parts, int stride, int count) {
  Map fold = parts[0];
#pragma unroll 5
  for (int i = 1; i < count; ++i) fold = combine(fold, parts[i * stride]);
  return fold;
}

// The block's tile, in all its threads.
__device__ __forceinline__ long long take_ticket(const LinearArgs& args) {
  __shared__ long long ticket;
  if (threadIdx.x == 0) ticket = (long long)atomicAdd(reinterpret_cast<Cell*>(args.cells), 1ull);
  __syncthreads();
  return ticket;
}

__device__ __forceinline__ void clear_cells(const LinearArgs& args) {
  struct alignas(16) Two {
    Cell first, second;
  };
  for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < args.cell_pairs;
       i += (long long)gridDim.x * blockDim.x)
    reinterpret_cast<Two*>(args.cells)[i] = {0, 0};
}
