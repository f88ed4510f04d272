// Runs CUDA kernels on the host, one block after another and one fibre per thread of the block. Force-included before
// kernels.cu by `shim.py`'s wrapper; C++17, tests only.
//
// A fibre leaves the processor only inside a synchronising operation. What this finds: missing barriers, divergent
// barriers and masks, wrong indices. What it cannot find: races between blocks, memory order, alignment faults.
#pragma once
#include <csetjmp>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // blocks run one at a time
#define DYNAMIC_SHARED(type, name) type* name = (type*)shim::dynamic_shared.data()

struct float4 { float x, y, z, w; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct dim3 { unsigned x, y, z; };
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace shim {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 256 << 10;
constexpr unsigned char POISON = 0xA5;

enum Kind { SYNCWARP, BALLOT, SHUFFLE, REDUCE, MATCH };

struct Fibre {
    char* stack;
    ucontext_t start;
    jmp_buf jump;
    bool started, done;
};

struct Warp {
    unsigned live, arrived, mask;
    int kind;
    unsigned long generation;
    unsigned long long slots[WARP], copies[WARP][WARP];
};

static std::vector<Fibre> fibres;
static std::vector<Warp> warps;
static std::vector<unsigned char> dynamic_shared;
static std::function<void()> body;
static jmp_buf scheduler;
static int current, num_live, num_waiting;
static unsigned long generation, num_moves;

[[noreturn]] static void fail(const char* what) {
    fprintf(stderr, "shim: %s (block %u, thread %d; %d live threads, %d of them at the barrier)\n", what, blockIdx.x,
            current, num_live, num_waiting);
    abort();
}

static void yield() {
    if (!_setjmp(fibres[current].jump)) _longjmp(scheduler, 1);
}

static void release_barrier_if_full() {
    if (num_waiting == 0 || num_waiting != num_live) return;
    num_waiting = 0;
    generation++;
    num_moves++;
}

static void barrier() {
    unsigned long mine = generation;
    num_waiting++;
    num_moves++;
    release_barrier_if_full();
    while (generation == mine) yield();
}

static void complete_if_full(Warp& warp) {
    if (!warp.arrived || warp.arrived != (warp.mask & warp.live)) return;
    for (int lane = 0; lane < WARP; lane++)
        if (warp.arrived >> lane & 1) memcpy(warp.copies[lane], warp.slots, sizeof warp.slots);
    warp.arrived = 0;
    warp.generation++;
    num_moves++;
}

// Everybody's operand, by lane: the private copy of this lane, valid until its next operation.
static const unsigned long long* meet(unsigned mask, Kind kind, unsigned long long operand) {
    Warp& warp = warps[current / WARP];
    int lane = current % WARP;
    if (!(mask >> lane & 1)) fail("a lane calls a warp operation with a mask that leaves it out");
    if (warp.arrived && (warp.kind != kind || warp.mask != mask)) fail("lanes of one mask meet in different operations");
    warp.kind = kind;
    warp.mask = mask;
    warp.slots[lane] = operand;
    warp.arrived |= 1u << lane;
    unsigned long mine = warp.generation;
    num_moves++;
    complete_if_full(warp);
    while (warp.generation == mine) yield();
    return warp.copies[lane];
}

static unsigned members(unsigned mask) { return mask & warps[current / WARP].live; }

static void finish() {
    fibres[current].done = true;
    num_live--;
    num_moves++;
    Warp& warp = warps[current / WARP];
    warp.live &= ~(1u << current % WARP);
    complete_if_full(warp);
    release_barrier_if_full();
    _longjmp(scheduler, 1);
}

static void enter() {
    body();
    finish();
}

static void resume(int thread) {
    Fibre& fibre = fibres[thread];
    current = thread;
    threadIdx = dim3{(unsigned)thread, 0, 0};
    if (_setjmp(scheduler)) return;
    if (fibre.started) _longjmp(fibre.jump, 1);
    fibre.started = true;
    getcontext(&fibre.start);
    // Tops at different offsets, or the stacks of all fibres would fall onto the same cache sets.
    fibre.start.uc_stack.ss_sp = fibre.stack;
    fibre.start.uc_stack.ss_size = STACK_BYTES - 64 * (thread % 61);
    fibre.start.uc_link = nullptr;
    makecontext(&fibre.start, enter, 0);
    setcontext(&fibre.start);
}

static std::vector<int> ordered(int count, int order, unsigned salt) {
    std::vector<int> items(count);
    std::iota(items.begin(), items.end(), 0);
    if (order == 1) std::reverse(items.begin(), items.end());
    if (order > 1) std::shuffle(items.begin(), items.end(), std::mt19937(order * 7919u + salt));
    return items;
}

static void run_block(int num_threads, int order) {
    while ((int)fibres.size() < num_threads) {
        void* stack = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED) fail("no memory for stacks");
        fibres.push_back(Fibre{(char*)stack, {}, {}, false, false});
    }
    warps.assign((num_threads + WARP - 1) / WARP, Warp{});
    for (int thread = 0; thread < num_threads; thread++) {
        fibres[thread].started = fibres[thread].done = false;
        warps[thread / WARP].live |= 1u << thread % WARP;
    }
    std::fill(dynamic_shared.begin(), dynamic_shared.end(), POISON);
    num_live = num_threads;
    num_waiting = 0;
    std::vector<int> threads = ordered(num_threads, order, blockIdx.x);
    while (num_live) {
        unsigned long before = num_moves;
        for (int thread : threads)
            if (!fibres[thread].done) resume(thread);
        if (num_moves == before) fail("deadlock: nothing moved");
    }
}

template <class... P, size_t... I>
void launch(void (*kernel)(P...), std::index_sequence<I...>, const unsigned* dims, size_t shared, int order, void** args) {
    gridDim = dim3{dims[0], dims[1], dims[2]};
    blockDim = dim3{dims[3], dims[4], dims[5]};
    if (dims[1] * dims[2] * dims[4] * dims[5] != 1) fail("only one-dimensional launches");
    if (dims[3] == 0 || dims[3] > 1024 || dims[0] == 0) fail("no such launch");
    dynamic_shared.resize(shared);
    body = [&] { kernel(*(std::remove_const_t<P>*)args[I]...); };
    for (int block : ordered((int)dims[0], order, 12345)) {
        blockIdx = dim3{(unsigned)block, 0, 0};
        run_block((int)dims[3], order);
    }
}

template <class... P>
void launch(void (*kernel)(P...), const unsigned* dims, size_t shared, int order, void** args) {
    launch(kernel, std::index_sequence_for<P...>{}, dims, shared, order, args);
}

template <class... P>
int sizes(void (*)(P...), size_t* out) {
    size_t all[] = {sizeof(P)..., 0};
    if (out) std::copy(all, all + sizeof...(P), out);
    return sizeof...(P);
}

template <class T, class F>
T cast(F from) {
    static_assert(sizeof(T) <= 8 && sizeof(F) <= 8);
    T to;
    unsigned long long wide = 0;
    memcpy(&wide, &from, sizeof from);
    memcpy(&to, &wide, sizeof to);
    return to;
}

template <class T, class Source>
T shuffle(unsigned mask, T value, int width, Source source) {
    int lane = current % WARP, first = lane / width * width;
    int from = source(lane, first, first + width);
    return cast<T>(meet(mask, SHUFFLE, cast<unsigned long long>(value))[from]);
}

}  // namespace shim

static inline void __syncthreads() { shim::barrier(); }
static inline void __syncwarp(unsigned mask = ~0u) { shim::meet(mask, shim::SYNCWARP, 0); }
static inline void __threadfence() {}

static inline unsigned __ballot_sync(unsigned mask, int predicate) {
    unsigned lanes = shim::members(mask), bits = 0;
    const unsigned long long* all = shim::meet(mask, shim::BALLOT, predicate != 0);
    for (int lane = 0; lane < shim::WARP; lane++) bits |= (lanes >> lane & 1 && all[lane]) ? 1u << lane : 0;
    return bits;
}
static inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }

template <class T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    return shim::shuffle(mask, value, width, [=](int, int first, int) { return first + from % width; });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    return shim::shuffle(mask, value, width, [=](int lane, int first, int) { return lane - (int)delta < first ? lane : lane - (int)delta; });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
    return shim::shuffle(mask, value, width, [=](int lane, int, int end) { return (lane ^ bits) < end ? lane ^ bits : lane; });
}

template <class T, class Fold>
T shim_reduce(unsigned mask, T value, Fold fold) {
    unsigned lanes = shim::members(mask);
    const unsigned long long* all = shim::meet(mask, shim::REDUCE, shim::cast<unsigned long long>(value));
    for (int lane = 0; lane < shim::WARP; lane++)
        if (lanes >> lane & 1) value = fold(value, shim::cast<T>(all[lane]));
    return value;
}
static inline int __reduce_max_sync(unsigned mask, int value) {
    return shim_reduce(mask, value, [](int a, int b) { return a > b ? a : b; });
}
static inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
    return shim_reduce(mask, value, [](unsigned a, unsigned b) { return a | b; });
}
static inline unsigned __match_any_sync(unsigned mask, int value) {
    unsigned lanes = shim::members(mask), bits = 0;
    const unsigned long long* all = shim::meet(mask, shim::MATCH, shim::cast<unsigned long long>(value));
    for (int lane = 0; lane < shim::WARP; lane++)
        if (lanes >> lane & 1 && shim::cast<int>(all[lane]) == value) bits |= 1u << lane;
    return bits;
}

template <class T>
T atomicAdd(T* at, T value) { T old = *at; *at = old + value; return old; }
template <class T>
T atomicOr(T* at, T value) { T old = *at; *at = old | value; return old; }

static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __clz(int v) { return v ? __builtin_clz((unsigned)v) : 32; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline int __float_as_int(float v) { return shim::cast<int>(v); }
static inline float __int_as_float(int v) { return shim::cast<float>(v); }

#define SHIM_EXPORT(name)                                                                             \
    extern "C" void shim_run_##name(const unsigned* dims, size_t shared, int order, void** args) {    \
        shim::launch(&name, dims, shared, order, args);                                               \
    }                                                                                                 \
    extern "C" int shim_sizes_##name(size_t* out) { return shim::sizes(&name, out); }
