// What NVRTC knows without a header, for a C++ compiler: the words of CUDA C++, its vector types and intrinsics.
// Included before a kernel text. Everything that waits for other threads, or orders memory, is a call into
// runtime.cpp and carries the place it was written at.
#pragma once
#include <math.h>
#include <stddef.h>

#include <type_traits>
#include <utility>

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__ static const
#define __grid_constant__
#ifdef CUSCAN_COVERAGE  // of inlined code gcov counts not every line
#define __forceinline__ inline
#else
#define __forceinline__ inline __attribute__((always_inline))
#endif
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
// Thread-local variables of a shared library lie in a segment of their own: the runtime finds all static shared
// arrays there, those inside templates too, where compilers ignore a section attribute.
#define __shared__ static thread_local

#define CUSCAN_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()
#define CUSCAN_UNCHECKED __attribute__((no_sanitize("thread", "alignment")))

// ---- vector types ------------------------------------------------------------------------------------------

#define CUSCAN_VECTORS(name, type, align2, align4)                            \
  struct name##1 { type x; };                                                 \
  struct __align__(align2) name##2 { type x, y; };                            \
  struct name##3 { type x, y, z; };                                           \
  struct __align__(align4) name##4 { type x, y, z, w; };                      \
  inline name##1 make_##name##1(type x) { return {x}; }                       \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
CUSCAN_VECTORS(char, signed char, 2, 4)
CUSCAN_VECTORS(uchar, unsigned char, 2, 4)
CUSCAN_VECTORS(short, short, 4, 8)
CUSCAN_VECTORS(ushort, unsigned short, 4, 8)
CUSCAN_VECTORS(int, int, 8, 16)
CUSCAN_VECTORS(uint, unsigned int, 8, 16)
CUSCAN_VECTORS(long, long, 16, 16)
CUSCAN_VECTORS(ulong, unsigned long, 16, 16)
CUSCAN_VECTORS(longlong, long long, 16, 16)
CUSCAN_VECTORS(ulonglong, unsigned long long, 16, 16)
CUSCAN_VECTORS(float, float, 8, 16)
CUSCAN_VECTORS(double, double, 16, 16)
#undef CUSCAN_VECTORS

struct dim3 {
  unsigned int x, y, z;
  constexpr dim3(unsigned int x = 1, unsigned int y = 1, unsigned int z = 1) : x(x), y(y), z(z) {}
};

// ---- the runtime ---------------------------------------------------------------------------------------------

extern "C" {
// Constant for the thread that reads them, which is all a kernel can see; the runtime sets them at each switch.
#ifdef CUSCAN_RUNTIME
extern uint3 threadIdx, blockIdx, blockDim, gridDim;
#else
extern const uint3 threadIdx, blockIdx, blockDim, gridDim;
#endif
extern unsigned char cuscan_dynamic_shared[];
unsigned long long cuscan_exchange(const char* op, unsigned mask, unsigned long long value, int source,
                                   const char* file, int line);
unsigned cuscan_ballot(const char* op, unsigned mask, int predicate, const char* file, int line);
void cuscan_syncwarp(unsigned mask, const char* file, int line);
int cuscan_barrier(const char* op, int predicate, const char* file, int line);
void cuscan_atomic(void* address, unsigned size, const char* file, int line);
void cuscan_fence();
void cuscan_pause(const char* file, int line);
void cuscan_bad_width(const char* op, int width, const char* file, int line);
void cuscan_trap(const char* file, int line);
}
constexpr int warpSize = 32;

// ---- barriers and votes --------------------------------------------------------------------------------------

inline void __syncthreads(CUSCAN_PLACE) { cuscan_barrier("__syncthreads", 0, file, line); }
inline int __syncthreads_count(int predicate, CUSCAN_PLACE) {
  return cuscan_barrier("__syncthreads_count", predicate != 0, file, line);
}
inline int __syncthreads_or(int predicate, CUSCAN_PLACE) {
  return cuscan_barrier("__syncthreads_or", predicate != 0, file, line) != 0;
}
inline int __syncthreads_and(int predicate, CUSCAN_PLACE) {
  return cuscan_barrier("__syncthreads_and", predicate == 0, file, line) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu, CUSCAN_PLACE) { cuscan_syncwarp(mask, file, line); }
inline unsigned __ballot_sync(unsigned mask, int predicate, CUSCAN_PLACE) {
  return cuscan_ballot("__ballot_sync", mask, predicate != 0, file, line);
}
inline int __any_sync(unsigned mask, int predicate, CUSCAN_PLACE) {
  return cuscan_ballot("__any_sync", mask, predicate != 0, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, CUSCAN_PLACE) {
  return cuscan_ballot("__all_sync", mask, predicate == 0, file, line) == 0;
}

// ---- shuffles: the lane read is PTX's, own value where it lies outside the segment --------------------------

inline int cuscan_lane() { return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % warpSize; }
template <class T>
inline T cuscan_shuffle(const char* op, unsigned mask, T value, int source, bool inside, int width, const char* file,
                        int line) {
  static_assert(std::is_arithmetic<T>::value && sizeof(T) <= 8, "a shuffle moves a number of at most 8 bytes");
  if (width < 1 || width > warpSize || (width & (width - 1))) cuscan_bad_width(op, width, file, line);
  unsigned long long bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = cuscan_exchange(op, mask, bits, inside ? source : cuscan_lane(), file, line);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, CUSCAN_PLACE) {
  int first = cuscan_lane() & -width;
  return cuscan_shuffle("__shfl_sync", mask, value, first | (source & (width - 1)), true, width, file, line);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUSCAN_PLACE) {
  int source = cuscan_lane() - static_cast<int>(delta & 31), first = cuscan_lane() & -width;
  return cuscan_shuffle("__shfl_up_sync", mask, value, source, source >= first, width, file, line);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, CUSCAN_PLACE) {
  int source = cuscan_lane() + static_cast<int>(delta & 31), last = cuscan_lane() | (width - 1);
  return cuscan_shuffle("__shfl_down_sync", mask, value, source, source <= last, width, file, line);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int other, int width = warpSize, CUSCAN_PLACE) {
  int source = cuscan_lane() ^ (other & 31), last = cuscan_lane() | (width - 1);
  return cuscan_shuffle("__shfl_xor_sync", mask, value, source, source <= last, width, file, line);
}

// ---- memory: fibers change places only inside the runtime, so plain code is atomic ---------------------------

inline void __threadfence() { cuscan_fence(); }
inline void __threadfence_block() { cuscan_fence(); }
inline void __threadfence_system() { cuscan_fence(); }
inline void __nanosleep(unsigned, CUSCAN_PLACE) { cuscan_pause(file, line); }
inline void __trap(CUSCAN_PLACE) { cuscan_trap(file, line); }

template <class T>
struct CuscanSame {
  typedef T type;
};
#define CUSCAN_ATOMIC(name, next)                                                                \
  template <class T>                                                                             \
  CUSCAN_UNCHECKED inline T name(T* address, typename CuscanSame<T>::type value, CUSCAN_PLACE) { \
    cuscan_atomic(address, sizeof(T), file, line);                                               \
    T old = *address;                                                                            \
    *address = next;                                                                             \
    return old;                                                                                  \
  }
CUSCAN_ATOMIC(atomicAdd, old + value)
CUSCAN_ATOMIC(atomicSub, old - value)
CUSCAN_ATOMIC(atomicExch, value)
CUSCAN_ATOMIC(atomicMax, old < value ? value : old)
CUSCAN_ATOMIC(atomicMin, value < old ? value : old)
CUSCAN_ATOMIC(atomicAnd, old& value)
CUSCAN_ATOMIC(atomicOr, old | value)
CUSCAN_ATOMIC(atomicXor, old ^ value)
CUSCAN_ATOMIC(atomicInc, old >= value ? 0 : old + 1)
CUSCAN_ATOMIC(atomicDec, old == 0 || old > value ? value : old - 1)
#undef CUSCAN_ATOMIC
template <class T>
CUSCAN_UNCHECKED inline T atomicCAS(T* address, typename CuscanSame<T>::type expected,
                                    typename CuscanSame<T>::type value, CUSCAN_PLACE) {
  cuscan_atomic(address, sizeof(T), file, line);
  T old = *address;
  if (old == expected) *address = value;
  return old;
}
template <class T>
inline T __ldg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcg(const T* address) {
  return *address;
}
template <class T>
inline T __ldcs(const T* address) {
  return *address;
}
template <class T>
inline void __stcg(T* address, T value) {
  *address = value;
}
template <class T>
inline void __stcs(T* address, T value) {
  *address = value;
}

// ---- numbers -------------------------------------------------------------------------------------------------

template <class To, class From>
inline To cuscan_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "bits are kept, not converted");
  To result;
  __builtin_memcpy(&result, &value, sizeof(To));
  return result;
}
inline unsigned __float_as_uint(float x) { return cuscan_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cuscan_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuscan_bits<float>(x); }
inline float __int_as_float(int x) { return cuscan_bits<float>(x); }
inline long long __double_as_longlong(double x) { return cuscan_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuscan_bits<double>(x); }
inline int __double2hiint(double x) { return static_cast<int>(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return static_cast<int>(__double_as_longlong(x)); }
inline double __hiloint2double(int high, int low) {
  return __longlong_as_double(static_cast<long long>(high) << 32 | static_cast<unsigned>(low));
}

#define CUSCAN_MIN_MAX(type)                                \
  inline type min(type a, type b) { return b < a ? b : a; } \
  inline type max(type a, type b) { return a < b ? b : a; }
CUSCAN_MIN_MAX(int)
CUSCAN_MIN_MAX(unsigned)
CUSCAN_MIN_MAX(long)
CUSCAN_MIN_MAX(unsigned long)
CUSCAN_MIN_MAX(long long)
CUSCAN_MIN_MAX(unsigned long long)
#undef CUSCAN_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline double rsqrt(double x) { return 1 / sqrt(x); }
inline float exp10f(float x, int = 0) { return powf(10, x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __double2int_rn(double x) { return static_cast<int>(rint(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __double2float_rn(double x) { return static_cast<float>(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline unsigned __brev(unsigned x) {
  unsigned result = 0;
  for (int i = 0; i < 32; ++i) result |= (x >> i & 1) << (31 - i);
  return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }

// ---- entry points: what the loader must know of each kernel, taken from its type ----------------------------

struct CuscanParameter {
  unsigned size, item_size;  // item_size: of what a pointer points at, 0 for void
  char kind, item_kind;      // p pointer, s struct, b bool, f float, i signed, u unsigned, v void
  bool read_only;            // a pointer to const
};
struct CuscanEntry {
  const char* name;
  void (*call)(void** arguments);
  const CuscanParameter* parameters;
  int count, max_threads;
};
template <class T>
constexpr char cuscan_kind() {
  return std::is_pointer<T>::value          ? 'p'
         : std::is_void<T>::value           ? 'v'
         : std::is_same<T, bool>::value     ? 'b'
         : std::is_floating_point<T>::value ? 'f'
         : std::is_enum<T>::value           ? 'i'
         : !std::is_arithmetic<T>::value    ? 's'
         : std::is_signed<T>::value         ? 'i'
                                            : 'u';
}
template <class T>
constexpr CuscanParameter cuscan_parameter() {
  typedef std::remove_pointer_t<T> Item;
  typedef std::remove_cv_t<Item> Plain;
  return {sizeof(T), sizeof(std::conditional_t<std::is_void<Plain>::value, char, Plain>) * !std::is_void<Plain>::value,
          cuscan_kind<T>(), cuscan_kind<Plain>(), std::is_const<Item>::value};
}
template <auto kernel>
struct CuscanKernel;
template <class... P, void (*kernel)(P...)>
struct CuscanKernel<kernel> {
  static constexpr CuscanParameter parameters[sizeof...(P) + 1] = {cuscan_parameter<P>()..., {}};
  template <size_t... I>
  CUSCAN_UNCHECKED static void call(void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<P*>(arguments[I])...);
  }
  CUSCAN_UNCHECKED static void call(void** arguments) { call(arguments, std::index_sequence_for<P...>()); }
  static constexpr CuscanEntry entry(const char* name, int max_threads) {
    return {name, &CuscanKernel::call, parameters, sizeof...(P), max_threads};
  }
};
constexpr int cuscan_bound(int threads = 1024, int = 0, int = 0) { return threads; }
