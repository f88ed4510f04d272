// All device code of zenray: compiled by NVRTC at run time, and by a host compiler in the tests. No #include.
//
// What every kernel writes is defined, byte for byte, by a NumPy function elsewhere in this package: block formats in
// codecs/blockint.py, fp8.py and cast.py, bounded blocks in codecs/bounded.py, rows and sets in kernels/twins.py.
//
// What keeps the bytes equal: no fast-math, no contraction (every float operation is an explicit __f.._rn or rint);
// maxima of absolute values as integer maxima, which also find NaN and infinity; sums in rank order; a clamp before
// every float -> int cast; a stored NaN is always 0x7fc00000. Atomics only on integers and only where order cannot show.
//
// What keeps it fast and safe: grid-stride loops over tiles; warp operations with full masks in loops that are uniform
// over the warp; 16-byte accesses where the pointer allows it and a scalar path where it does not; 64-bit sizes; no
// block ever waits for another: prefix sums are made by the last block to arrive.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct Bf16 {
    u16 bits;
};

#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif
#define KERNEL extern "C" __global__ void __launch_bounds__(256)
#define DEVICE __device__ __forceinline__

constexpr u32 FULL = 0xffffffffu;
constexpr i32 ABS = 0x7fffffff, INF = 0x7f800000, QUIET_NAN = 0x7fc00000;
constexpr int WARP = 32, WARPS = 8, THREADS = WARP * WARPS;
constexpr u32 NONFINITE = 1;
constexpr i64 HEADER_BYTES = 16;

DEVICE int lane_id() { return threadIdx.x % WARP; }
DEVICE int warp_id() { return threadIdx.x / WARP; }
DEVICE i64 first_warp() { return (i64)blockIdx.x * WARPS + warp_id(); }
DEVICE i64 num_warps() { return (i64)gridDim.x * WARPS; }
DEVICE i64 first_thread() { return (i64)blockIdx.x * THREADS + threadIdx.x; }
DEVICE i64 num_threads() { return (i64)gridDim.x * THREADS; }

DEVICE float as_float(i32 bits) { return __int_as_float(bits); }
DEVICE i32 magnitude(float v) { return __float_as_int(v) & ABS; }
DEVICE bool is_finite(float v) { return magnitude(v) < INF; }
DEVICE float quiet(float v) { return magnitude(v) > INF ? as_float(QUIET_NAN) : v; }
DEVICE float widen(float v) { return v; }
DEVICE float widen(Bf16 v) { return as_float((i32)((u32)v.bits << 16)); }
DEVICE bool aligned(const void* p, u64 bytes) { return ((u64)p & (bytes - 1)) == 0; }
DEVICE i64 pad16(i64 bytes) { return (bytes + 15) / 16 * 16; }
DEVICE i64 lesser(i64 a, i64 b) { return a < b ? a : b; }

DEVICE u32 finalise(u32 h) {  // MurmurHash3, 32 bits
    h ^= h >> 16;
    h *= 0x85ebca6bu;
    h ^= h >> 13;
    h *= 0xc2b2ae35u;
    return h ^ (h >> 16);
}

// --- prefix sums over blocks -----------------------------------------------------------------------------------------

// Exclusive prefix of `count` over the threads of the block; *total receives their sum. All threads call it.
DEVICE i64 block_prefix(i64 count, i64* total) {
    __shared__ i64 warp_sums[WARPS];
    i64 sum = count;
    for (int step = 1; step < WARP; step *= 2) {
        i64 below = __shfl_up_sync(FULL, sum, step);
        if (lane_id() >= step) sum += below;
    }
    if (lane_id() == WARP - 1) warp_sums[warp_id()] = sum;
    __syncthreads();
    i64 before = 0, all = 0;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp_id()) before += warp_sums[w];
        all += warp_sums[w];
    }
    __syncthreads();
    *total = all;
    return before + sum - count;
}

// The last block to arrive replaces counts[0..num) by their exclusive prefix sums and puts the total into counts[num].
// `ticket` is zero before the first launch and is left at zero. All threads of all blocks call it, once.
DEVICE void scan_by_last(i64* counts, i64 num, u32* ticket) {
    constexpr int EACH = 8;
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    volatile i64* table = counts;
    i64 carry = 0;
    for (i64 base = 0; base < num; base += THREADS * EACH) {
        i64 at = base + (i64)threadIdx.x * EACH, mine[EACH], sum = 0, total;
        for (int i = 0; i < EACH; i++) {
            mine[i] = at + i < num ? table[at + i] : 0;
            sum += mine[i];
        }
        i64 cursor = carry + block_prefix(sum, &total);
        for (int i = 0; i < EACH; i++) {
            if (at + i < num) table[at + i] = cursor;
            cursor += mine[i];
        }
        carry += total;
    }
    if (threadIdx.x == 0) {
        table[num] = carry;
        *ticket = 0;
    }
}

// --- tiles of 256 values ---------------------------------------------------------------------------------------------
// A warp holds one tile: lane l has values 4l .. 4l+3 of each half of 128, so that loads, stores and packed codes are
// contiguous over the warp. Values beyond n count as zero.

constexpr int TILE = 256, EACH = 8;

struct Tile {
    i64 index, n;
    int lane;
    DEVICE i64 place(int half) const { return index * TILE + half * (TILE / 2) + 4 * lane; }
    DEVICE bool whole() const { return (index + 1) * TILE <= n; }
};

DEVICE void load4(const float* p, float* v) {
    float4 four = *(const float4*)p;
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

DEVICE void load4(const Bf16* p, float* v) {
    uint2 four = *(const uint2*)p;
    v[0] = as_float((i32)(four.x << 16)), v[1] = as_float((i32)(four.x & 0xffff0000u));
    v[2] = as_float((i32)(four.y << 16)), v[3] = as_float((i32)(four.y & 0xffff0000u));
}

template <class In>
DEVICE void load_tile(const In* x, Tile t, float (&v)[EACH]) {
    bool wide = t.whole() && aligned(x, 4 * sizeof(In));
    for (int half = 0; half < 2; half++) {
        i64 at = t.place(half);
        if (wide) {
            load4(x + at, v + 4 * half);
        } else {
            for (int i = 0; i < 4; i++) v[4 * half + i] = at + i < t.n ? widen(x[at + i]) : 0.0f;
        }
    }
}

DEVICE void store_tile(float* out, Tile t, const float (&v)[EACH]) {
    bool wide = t.whole() && aligned(out, 16);
    for (int half = 0; half < 2; half++) {
        i64 at = t.place(half);
        const float* w = v + 4 * half;
        if (wide) {
            *(float4*)(out + at) = float4{w[0], w[1], w[2], w[3]};
        } else {
            for (int i = 0; i < 4; i++)
                if (at + i < t.n) out[at + i] = w[i];
        }
    }
}

// The first min(4, room) bytes of a word at a multiple of 4.
DEVICE void put_bytes(u8* to, u32 word, i64 room) {
    if (room >= 4) {
        *(u32*)to = word;
    } else {
        for (int i = 0; i < room; i++) to[i] = (u8)(word >> (8 * i));
    }
}

DEVICE u32 get_bytes(const u8* from, i64 room) {
    if (room >= 4) return *(const u32*)from;
    u32 word = 0;
    for (int i = 0; i < room; i++) word |= (u32)from[i] << (8 * i);
    return word;
}

DEVICE i32 lane_maximum(const float (&a)[EACH], int first, int count) {
    i32 top = 0;
    for (int i = first; i < first + count; i++) top = magnitude(a[i]) > top ? magnitude(a[i]) : top;
    return top;
}

// --- block formats ---------------------------------------------------------------------------------------------------
// encode: writes scale and codes of one tile and what they decode to; returns whether a block is not finite.
// decode: what one tile decodes to, before the factor.

struct Noise {  // of stochastic rounding
    u32 on, low, high;
    DEVICE float at(i64 element) const {
        return __fmul_rn((float)(finalise(finalise((u32)element ^ low) ^ high) >> 8), 5.9604644775390625e-8f);
    }
};

struct Int8Block {
    static constexpr int BLOCK = 256, SCALE_BYTES = 4, ROW_BYTES = 256;
    static constexpr i32 TINY = 0x04800000;
    DEVICE static i64 tail_bytes(i64 rest) { return rest; }

    DEVICE static bool encode(const float (&a)[EACH], u8* scales, u8* payload, Tile t, Noise, float (&d)[EACH]) {
        i32 top = __reduce_max_sync(FULL, lane_maximum(a, 0, EACH));
        bool finite = top < INF, usable = finite && top >= TINY;
        float inverse = usable ? __fdiv_rn(127.0f, as_float(top)) : 0.0f;
        float scale = usable ? __fdiv_rn(as_float(top), 127.0f) : finite ? 0.0f : as_float(QUIET_NAN);
        if (t.lane == 0) ((float*)scales)[t.index] = scale;
        for (int half = 0; half < 2; half++) {
            u32 word = 0;
            for (int i = 0; i < 4; i++) {
                float q = finite ? rintf(__fmul_rn(a[4 * half + i], inverse)) : 0.0f;
                q = q > 127.0f ? 127.0f : q < -127.0f ? -127.0f : q;
                word |= (u32)(u8)(i32)q << (8 * i);
                d[4 * half + i] = __fmul_rn(q, scale);
            }
            put_bytes(payload + t.place(half), word, t.n - t.place(half));
        }
        return !finite;
    }

    DEVICE static void decode(const u8* scales, const u8* payload, Tile t, float (&d)[EACH]) {
        float scale = ((const float*)scales)[t.index];
        for (int half = 0; half < 2; half++) {
            u32 word = get_bytes(payload + t.place(half), t.n - t.place(half));
            for (int i = 0; i < 4; i++) d[4 * half + i] = __fmul_rn((float)(signed char)(word >> (8 * i)), scale);
        }
    }
};

// The orthogonal rotation of each block of 32, which eight lanes hold with four values each.
DEVICE void rotate32(float* v) {
    for (int h = 1; h < 4; h *= 2) {
        for (int i = 0; i < 4; i++) {
            if (i & h) continue;
            float a = v[i], b = v[i + h];
            v[i] = __fadd_rn(a, b);
            v[i + h] = __fsub_rn(a, b);
        }
    }
    for (int h = 1; h < 8; h *= 2) {
        for (int i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(FULL, v[i], h);
            v[i] = lane_id() & h ? __fsub_rn(other, v[i]) : __fadd_rn(v[i], other);
        }
    }
    for (int i = 0; i < 4; i++) v[i] = __fmul_rn(v[i], 0.17677669529663687f);
}

// Half h of a tile holds blocks 8 index + 4 h + lane / 8. Bytes 4 p .. 4 p + 3 of a block come from its lane p (low
// halves) and its lane p + 4 (high halves).
template <bool ROTATED>
struct Int4Block {
    static constexpr int BLOCK = 32, SCALE_BYTES = 2, ROW_BYTES = 16;
    static constexpr i32 TINY = 0x04800000;
    DEVICE static i64 tail_bytes(i64 rest) { return ROTATED || rest > 16 ? 16 : rest; }
    DEVICE static i64 block_of(Tile t, int half) { return t.index * 8 + half * 4 + t.lane / 8; }
    DEVICE static i64 room(Tile t, i64 block) {
        i64 left = t.n - block * BLOCK;
        return ROTATED ? (left > 0 ? 4 : 0) : left - 4 * (t.lane & 3);
    }

    DEVICE static bool encode(const float (&a)[EACH], u8* scales, u8* payload, Tile t, Noise noise, float (&d)[EACH]) {
        bool bad = false;
        for (int half = 0; half < 2; half++) {
            float v[4];
            for (int i = 0; i < 4; i++) v[i] = a[4 * half + i];
            if (ROTATED) rotate32(v);
            i32 top = 0;
            for (int i = 0; i < 4; i++) top = magnitude(v[i]) > top ? magnitude(v[i]) : top;
            for (int h = 1; h < 8; h *= 2) {
                i32 other = __shfl_xor_sync(FULL, top, h);
                top = other > top ? other : top;
            }
            bool finite = top < INF, usable = finite && top >= TINY;
            i32 u = __float_as_int(__fdiv_rn(as_float(usable ? top : 0x40e00000), 7.0f));
            i32 rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
            float inverse = usable ? __fdiv_rn(1.0f, as_float(rounded << 16)) : 0.0f;
            i32 scale = usable ? rounded : finite ? 0 : 0x7fc0;
            i64 block = block_of(t, half);
            if (t.lane % 8 == 0 && block * BLOCK < t.n) ((u16*)scales)[block] = (u16)scale;
            u32 codes = 0;
            float w[4];
            for (int i = 0; i < 4; i++) {
                float scaled = finite ? __fmul_rn(v[i], inverse) : 0.0f;
                float q = noise.on ? floorf(__fadd_rn(scaled, noise.at(t.place(half) + i))) : rintf(scaled);
                q = q > 7.0f ? 7.0f : q < -7.0f ? -7.0f : q;
                codes |= (u32)((i32)q + 8) << (8 * i);
                w[i] = __fmul_rn((float)(i32)q, as_float(scale << 16));
            }
            if (ROTATED) rotate32(w);
            for (int i = 0; i < 4; i++) d[4 * half + i] = w[i];
            u32 upper = __shfl_xor_sync(FULL, codes, 4);
            u32 word = finite ? codes | (upper << 4) : 0;
            if (t.lane % 8 < 4) put_bytes(payload + block * ROW_BYTES + 4 * (t.lane & 3), word, room(t, block));
            bad |= !finite;
        }
        return bad;
    }

    DEVICE static void decode(const u8* scales, const u8* payload, Tile t, float (&d)[EACH]) {
        for (int half = 0; half < 2; half++) {
            i64 block = block_of(t, half);
            bool exists = block * BLOCK < t.n;
            float scale = exists ? as_float((i32)((u32)((const u16*)scales)[block] << 16)) : 0.0f;
            u32 word = exists ? get_bytes(payload + block * ROW_BYTES + 4 * (t.lane & 3), room(t, block)) : 0;
            u32 codes = t.lane & 4 ? word >> 4 : word;
            float w[4];
            for (int i = 0; i < 4; i++) w[i] = __fmul_rn((float)((i32)((codes >> (8 * i)) & 15) - 8), scale);
            if (ROTATED) rotate32(w);
            for (int i = 0; i < 4; i++) d[4 * half + i] = w[i];
        }
    }
};

// SHIFT: mantissa bits dropped. TOP: largest code. LARGEST: its value. STEP: the smallest subnormal, 2^-9 or 2^-16.
template <int SHIFT, int BIAS, int TOP>
struct Fp8Block {
    static constexpr int BLOCK = 256, SCALE_BYTES = 4, ROW_BYTES = 256;
    static constexpr i32 TINY = 0x08800000;
    static constexpr float LARGEST = SHIFT == 20 ? 448.0f : 57344.0f;
    static constexpr float STEPS = SHIFT == 20 ? 512.0f : 65536.0f, STEP = 1.0f / STEPS;
    DEVICE static i64 tail_bytes(i64 rest) { return rest; }

    DEVICE static u32 code_of(float y) {
        i32 u = __float_as_int(y), m = u & ABS, half = (1 << (SHIFT - 1)) - 1;
        i32 normal = ((m + half + ((m >> SHIFT) & 1)) >> SHIFT) - ((127 - BIAS) << (23 - SHIFT));
        float steps = __fmul_rn(as_float(m), STEPS);
        i32 small = (i32)rintf(steps < 64.0f ? steps : 64.0f);
        i32 code = m < ((128 - BIAS) << 23) ? small : normal < TOP ? normal : TOP;
        return (u32)code | (((u32)u >> 24) & 0x80u);
    }

    DEVICE static float value_of(u32 code) {
        i32 m = (i32)(code & 0x7f);
        float v = m >> (23 - SHIFT) == 0 ? __fmul_rn((float)m, STEP) : as_float((m << SHIFT) + ((127 - BIAS) << 23));
        return code & 0x80 ? -v : v;
    }

    DEVICE static bool encode(const float (&a)[EACH], u8* scales, u8* payload, Tile t, Noise, float (&d)[EACH]) {
        i32 top = __reduce_max_sync(FULL, lane_maximum(a, 0, EACH));
        bool finite = top < INF, usable = finite && top >= TINY;
        float inverse = usable ? __fdiv_rn(LARGEST, as_float(top)) : 0.0f;
        float scale = usable ? __fdiv_rn(as_float(top), LARGEST) : finite ? 0.0f : as_float(QUIET_NAN);
        if (t.lane == 0) ((float*)scales)[t.index] = scale;
        for (int half = 0; half < 2; half++) {
            u32 word = 0;
            for (int i = 0; i < 4; i++) {
                u32 code = finite ? code_of(__fmul_rn(a[4 * half + i], inverse)) : 0;
                word |= code << (8 * i);
                d[4 * half + i] = __fmul_rn(value_of(code), scale);
            }
            put_bytes(payload + t.place(half), word, t.n - t.place(half));
        }
        return !finite;
    }

    DEVICE static void decode(const u8* scales, const u8* payload, Tile t, float (&d)[EACH]) {
        float scale = ((const float*)scales)[t.index];
        for (int half = 0; half < 2; half++) {
            u32 word = get_bytes(payload + t.place(half), t.n - t.place(half));
            for (int i = 0; i < 4; i++) d[4 * half + i] = __fmul_rn(value_of((word >> (8 * i)) & 0xff), scale);
        }
    }
};

struct Bf16Cast {
    static constexpr int BLOCK = 256, SCALE_BYTES = 0, ROW_BYTES = 512;
    DEVICE static i64 tail_bytes(i64 rest) { return 2 * rest; }

    DEVICE static bool encode(const float (&a)[EACH], u8*, u8* payload, Tile t, Noise, float (&d)[EACH]) {
        for (int half = 0; half < 2; half++) {
            u32 codes[4];
            for (int i = 0; i < 4; i++) {
                u32 u = (u32)__float_as_int(a[4 * half + i]);
                u32 rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
                codes[i] = magnitude(a[4 * half + i]) > INF ? (u >> 16) | 0x40u : rounded;
                d[4 * half + i] = as_float((i32)(codes[i] << 16));
            }
            i64 room = t.n - t.place(half);
            u16* to = (u16*)payload + t.place(half);
            if (room >= 4) {
                *(uint2*)to = uint2{codes[0] | (codes[1] << 16), codes[2] | (codes[3] << 16)};
            } else {
                for (int i = 0; i < 4; i++)
                    if (i < room) to[i] = (u16)codes[i];
            }
        }
        return lane_maximum(a, 0, EACH) >= INF;
    }

    DEVICE static void decode(const u8*, const u8* payload, Tile t, float (&d)[EACH]) {
        load_tile((const Bf16*)payload, t, d);
    }
};

// --- packets of block formats ----------------------------------------------------------------------------------------
// header 16 | scales, padded to 16 | payload, padded to 16. The flags word (byte 4) is zero before the launch; kernels
// only add bits to it.

template <class F>
struct Packet {
    u8 *base, *scales, *payload;
    DEVICE Packet(u8* packet, i64 n)
        : base(packet), scales(packet + HEADER_BYTES), payload(scales + pad16((n + F::BLOCK - 1) / F::BLOCK * F::SCALE_BYTES)) {}

    DEVICE void raise(u32 flags) const { atomicOr((u32*)(base + 4), flags); }

    // Everything but flags, scales and codes, by the first block.
    DEVICE void frame(u32 head, i64 n) const {
        if (blockIdx.x != 0) return;
        if (threadIdx.x == 0) {
            *(u32*)base = head;
            *(i64*)(base + 8) = n;
        }
        i64 blocks = (n + F::BLOCK - 1) / F::BLOCK, rest = n % F::BLOCK;
        u8* scale_end = scales + blocks * F::SCALE_BYTES;
        u8* end = payload + n / F::BLOCK * F::ROW_BYTES + (rest ? F::tail_bytes(rest) : 0);
        i64 pad = payload + pad16(end - payload) - end;
        if (threadIdx.x < payload - scale_end) scale_end[threadIdx.x] = 0;
        if (threadIdx.x < pad) end[threadIdx.x] = 0;
    }
};

// Encode one tile of sums a and write what they lost; before = the residual that is already in a.
template <class F>
DEVICE void encode_tile(
    const float (&a)[EACH], const float (&before)[EACH], Packet<F> packet, Tile t, Noise noise, float* new_error) {
    float d[EACH];
    bool bad = F::encode(a, packet.scales, packet.payload, t, noise, d);
    if (__any_sync(FULL, bad) && t.lane == 0) packet.raise(NONFINITE);
    if (!new_error) return;
    for (int i = 0; i < EACH; i++) {
        float lost = __fsub_rn(a[i], d[i]);
        d[i] = is_finite(lost) ? lost : before[i];
    }
    store_tile(new_error, t, d);
}

template <class F, class In>
DEVICE void encode(const In* x, i64 n, const float* old_error, float* new_error, u8* out, u32 head, Noise noise) {
    Packet<F> packet(out, n);
    packet.frame(head, n);
    for (i64 index = first_warp(); index * TILE < n; index += num_warps()) {
        Tile t{index, n, lane_id()};
        float a[EACH], before[EACH];
        load_tile(x, t, a);
        if (old_error) {
            load_tile(old_error, t, before);
            for (int i = 0; i < EACH; i++) a[i] = __fadd_rn(a[i], before[i]);
        }
        encode_tile<F>(a, before, packet, t, noise, new_error);
    }
}

template <class F>
DEVICE void decode(const u8* in, i64 n, float* out, u32 accumulate, float factor) {
    Packet<F> packet((u8*)in, n);
    for (i64 index = first_warp(); index * TILE < n; index += num_warps()) {
        Tile t{index, n, lane_id()};
        float d[EACH], v[EACH];
        F::decode(packet.scales, packet.payload, t, d);
        if (accumulate) load_tile(out, t, v);
        for (int i = 0; i < EACH; i++) {
            d[i] = __fmul_rn(d[i], factor);
            d[i] = quiet(accumulate ? __fadd_rn(v[i], d[i]) : d[i]);
        }
        store_tile(out, t, d);
    }
}

struct Source {
    const u8* packet;
    float weight;
    u32 unused;
};

template <class F>
DEVICE void sum_tile(const Source* sources, i32 num_sources, Tile t, float scale, float (&sum)[EACH]) {
    for (int i = 0; i < EACH; i++) sum[i] = 0.0f;
#pragma unroll 2
    for (i32 s = 0; s < num_sources; s++) {
        Packet<F> packet((u8*)sources[s].packet, t.n);
        float d[EACH];
        F::decode(packet.scales, packet.payload, t, d);
        for (int i = 0; i < EACH; i++) sum[i] = __fadd_rn(sum[i], __fmul_rn(d[i], sources[s].weight));
    }
    // What fills up the last tile counts as zero: its codes are not in the packets.
    for (int i = 0; i < EACH; i++)
        sum[i] = t.place(i / 4) + i % 4 < t.n ? quiet(__fmul_rn(sum[i], scale)) : 0.0f;
}

template <class F>
DEVICE void reduce(const Source* sources, i32 num_sources, i64 n, float scale, float* out) {
    for (i64 index = first_warp(); index * TILE < n; index += num_warps()) {
        Tile t{index, n, lane_id()};
        float sum[EACH];
        sum_tile<F>(sources, num_sources, t, scale, sum);
        store_tile(out, t, sum);
    }
}

// flags: those of the sources, which the sum inherits.
template <class F>
DEVICE void reduce_encode(
    const Source* sources, i32 num_sources, i64 n, float scale, const float* old_error, float* new_error, u8* out,
    u32 head, u32 flags, Noise noise) {
    Packet<F> packet(out, n);
    packet.frame(head, n);
    if (flags && first_thread() == 0) packet.raise(flags);
    for (i64 index = first_warp(); index * TILE < n; index += num_warps()) {
        Tile t{index, n, lane_id()};
        float a[EACH], before[EACH];
        sum_tile<F>(sources, num_sources, t, scale, a);
        if (old_error) {
            load_tile(old_error, t, before);
            for (int i = 0; i < EACH; i++) a[i] = __fadd_rn(a[i], before[i]);
        }
        encode_tile<F>(a, before, packet, t, noise, new_error);
    }
}

#define BLOCK_FORMAT(name, ...)                                                                                       \
    KERNEL name##_encode_f32(                                                                                         \
        const float* x, i64 n, const float* old_error, float* new_error, u8* out, u32 head, u32 noise, u32 low,       \
        u32 high) {                                                                                                   \
        encode<__VA_ARGS__>(x, n, old_error, new_error, out, head, Noise{noise, low, high});                          \
    }                                                                                                                 \
    KERNEL name##_encode_bf16(                                                                                        \
        const Bf16* x, i64 n, const float* old_error, float* new_error, u8* out, u32 head, u32 noise, u32 low,        \
        u32 high) {                                                                                                   \
        encode<__VA_ARGS__>(x, n, old_error, new_error, out, head, Noise{noise, low, high});                          \
    }                                                                                                                 \
    KERNEL name##_decode(const u8* packet, i64 n, float* out, u32 accumulate, float factor) {                         \
        decode<__VA_ARGS__>(packet, n, out, accumulate, factor);                                                      \
    }                                                                                                                 \
    KERNEL name##_reduce(const Source* sources, i32 num_sources, i64 n, float scale, float* out) {                    \
        reduce<__VA_ARGS__>(sources, num_sources, n, scale, out);                                                     \
    }                                                                                                                 \
    KERNEL name##_reduce_encode(                                                                                      \
        const Source* sources, i32 num_sources, i64 n, float scale, const float* old_error, float* new_error,         \
        u8* out, u32 head, u32 flags, u32 noise, u32 low, u32 high) {                                                 \
        reduce_encode<__VA_ARGS__>(                                                                                   \
            sources, num_sources, n, scale, old_error, new_error, out, head, flags, Noise{noise, low, high});         \
    }

BLOCK_FORMAT(int8b, Int8Block)
BLOCK_FORMAT(int4b, Int4Block<false>)
BLOCK_FORMAT(int4b_hadamard, Int4Block<true>)
BLOCK_FORMAT(fp8b_e4m3, Fp8Block<20, 7, 0x7e>)
BLOCK_FORMAT(fp8b_e5m2, Fp8Block<21, 15, 0x7b>)
BLOCK_FORMAT(bf16, Bf16Cast)

// --- error-bounded blocks of 32 --------------------------------------------------------------------------------------
// One value a lane, so that a bit plane is a ballot. A warp takes 32 blocks, a block of threads 256 of them; first
// their sizes and the prefix sums, then the words.

constexpr i64 BOUNDED_GROUP = WARPS * WARP;
constexpr int RAW = 255, MAX_BITS = 30;

struct Bound {
    float width, inverse, limit;
};

DEVICE i64 words_of(u32 head) { return head == RAW ? 32 : head ? 1 + head : 0; }

// The integer of a value, and whether some value of the block cannot be written as one.
DEVICE i32 quantise(float a, Bound bound, bool* raw) {
    float r = rintf(__fmul_rn(a, bound.inverse));
    float error = as_float(magnitude(__fsub_rn(a, __fmul_rn(r, bound.width))));
    bool good = error <= bound.limit && as_float(magnitude(r)) < 1073741824.0f;
    *raw = __any_sync(FULL, !good);
    return good ? (i32)r : 0;
}

template <class In>
DEVICE float summed(const In* x, const float* old_error, i64 at, i64 n, float* before) {
    if (at >= n) return 0.0f;
    if (!old_error) return widen(x[at]);
    *before = old_error[at];
    return quiet(__fadd_rn(widen(x[at]), *before));
}

// Where the words of each of this warp's 32 blocks begin (one block a lane), from the header bytes of the group.
DEVICE i64 bounded_cursor(u32 head, const i64* starts, i64 group) {
    i64 total;
    return starts[group] + block_prefix(words_of(head), &total);
}

template <class In>
DEVICE void bounded_sizes(
    const In* x, i64 n, const float* old_error, Bound bound, u8* heads, i64* starts, u32* ticket) {
    i64 num_blocks = (n + WARP - 1) / WARP, num_groups = (num_blocks + BOUNDED_GROUP - 1) / BOUNDED_GROUP;
    for (i64 group = blockIdx.x; group < num_groups; group += gridDim.x) {
        i64 first = group * BOUNDED_GROUP + warp_id() * WARP;
        u32 head = 0;
        for (int base = 0; base < WARP; base += EACH) {
            float a[EACH], before;
            for (int i = 0; i < EACH; i++)
                a[i] = summed(x, old_error, (first + base + i) * WARP + lane_id(), n, &before);
            for (int i = 0; i < EACH; i++) {
                bool raw;
                i32 q = quantise(a[i], bound, &raw);
                u32 bits = __reduce_or_sync(FULL, (u32)(q < 0 ? -q : q));
                if (lane_id() == base + i) head = raw ? RAW : 32 - __clz((i32)bits);
            }
        }
        i64 total;
        if (first + lane_id() < num_blocks) heads[first + lane_id()] = (u8)head;
        block_prefix(words_of(head), &total);
        if (threadIdx.x == 0) starts[group] = total;
    }
    scan_by_last(starts, num_groups, ticket);
}

template <class In>
DEVICE void bounded_write(
    const In* x, i64 n, const float* old_error, float* new_error, Bound bound, u8* packet, u32 head_word,
    const i64* starts) {
    i64 num_blocks = (n + WARP - 1) / WARP, num_groups = (num_blocks + BOUNDED_GROUP - 1) / BOUNDED_GROUP;
    u8* heads = packet + 2 * HEADER_BYTES;
    u32* words = (u32*)(heads + pad16(num_blocks));
    if (blockIdx.x == 0) {
        i64 used = starts[num_groups];
        if (threadIdx.x == 0) {
            *(u32*)packet = head_word;
            *(i64*)(packet + 8) = n;
            *(float*)(packet + 16) = bound.width;
            *(u32*)(packet + 20) = 0;
            *(i64*)(packet + 24) = 4 * used;
        }
        if (threadIdx.x < pad16(num_blocks) - num_blocks) heads[num_blocks + threadIdx.x] = 0;
        if (threadIdx.x < pad16(4 * used) / 4 - used) words[used + threadIdx.x] = 0;
    }
    for (i64 group = blockIdx.x; group < num_groups; group += gridDim.x) {
        i64 first = group * BOUNDED_GROUP + warp_id() * WARP;
        u32 mine = first + lane_id() < num_blocks ? heads[first + lane_id()] : 0;
        i64 cursor = bounded_cursor(mine, starts, group);
        for (int i = 0; i < WARP && first + i < num_blocks; i++) {
            u32 head = __shfl_sync(FULL, mine, i);
            i64 to = __shfl_sync(FULL, cursor, i), at = (first + i) * WARP + lane_id();
            float before = 0.0f, a = summed(x, old_error, at, n, &before), d = a;
            bool raw;
            i32 q = quantise(a, bound, &raw);
            u32 word = (u32)__float_as_int(a);
            if (raw) {
                if (__any_sync(FULL, !is_finite(a)) && lane_id() == 0) atomicOr((u32*)(packet + 4), NONFINITE);
            } else {
                d = __fmul_rn((float)q, bound.width);
                u32 signs = __ballot_sync(FULL, q < 0), size = (u32)(q < 0 ? -q : q);
                word = signs;
                for (u32 k = 0; k < head; k++) {
                    u32 plane = __ballot_sync(FULL, (size >> k) & 1);
                    if (lane_id() == (int)k + 1) word = plane;
                }
            }
            if (lane_id() < words_of(head)) words[to + lane_id()] = word;
            if (new_error && at < n) {
                float lost = __fsub_rn(a, d);
                new_error[at] = is_finite(lost) ? lost : before;
            }
        }
    }
}

KERNEL bounded_sizes_f32(
    const float* x, i64 n, const float* old_error, float width, float inverse, float limit, u8* heads, i64* starts,
    u32* ticket) {
    bounded_sizes(x, n, old_error, Bound{width, inverse, limit}, heads, starts, ticket);
}

KERNEL bounded_sizes_bf16(
    const Bf16* x, i64 n, const float* old_error, float width, float inverse, float limit, u8* heads, i64* starts,
    u32* ticket) {
    bounded_sizes(x, n, old_error, Bound{width, inverse, limit}, heads, starts, ticket);
}

KERNEL bounded_write_f32(
    const float* x, i64 n, const float* old_error, float* new_error, float width, float inverse, float limit,
    u8* packet, u32 head, const i64* starts) {
    bounded_write(x, n, old_error, new_error, Bound{width, inverse, limit}, packet, head, starts);
}

KERNEL bounded_write_bf16(
    const Bf16* x, i64 n, const float* old_error, float* new_error, float width, float inverse, float limit,
    u8* packet, u32 head, const i64* starts) {
    bounded_write(x, n, old_error, new_error, Bound{width, inverse, limit}, packet, head, starts);
}

// Word offsets of a received packet from its header bytes; *num_bad counts bytes that no packet has.
KERNEL bounded_starts(const u8* heads, i64 num_blocks, i64* starts, u64* num_bad, u32* ticket) {
    i64 num_groups = (num_blocks + BOUNDED_GROUP - 1) / BOUNDED_GROUP;
    for (i64 group = blockIdx.x; group < num_groups; group += gridDim.x) {
        i64 block = group * BOUNDED_GROUP + threadIdx.x, total;
        u32 head = block < num_blocks ? heads[block] : 0;
        if (head > MAX_BITS && head != RAW) atomicAdd(num_bad, 1ull);
        block_prefix(words_of(head), &total);
        if (threadIdx.x == 0) starts[group] = total;
    }
    scan_by_last(starts, num_groups, ticket);
}

KERNEL bounded_decode(const u8* packet, i64 n, const i64* starts, float* out, u32 accumulate, float scale) {
    i64 num_blocks = (n + WARP - 1) / WARP, num_groups = (num_blocks + BOUNDED_GROUP - 1) / BOUNDED_GROUP;
    const u8* heads = packet + 2 * HEADER_BYTES;
    const u32* words = (const u32*)(heads + pad16(num_blocks));
    float width = *(const float*)(packet + HEADER_BYTES);
    for (i64 group = blockIdx.x; group < num_groups; group += gridDim.x) {
        i64 first = group * BOUNDED_GROUP + warp_id() * WARP;
        u32 mine = first + lane_id() < num_blocks ? heads[first + lane_id()] : 0;
        i64 cursor = bounded_cursor(mine, starts, group);
        for (int i = 0; i < WARP && first + i < num_blocks; i++) {
            u32 head = __shfl_sync(FULL, mine, i);
            i64 from = __shfl_sync(FULL, cursor, i), at = (first + i) * WARP + lane_id();
            u32 word = lane_id() < words_of(head) ? words[from + lane_id()] : 0;
            float v = as_float((i32)word);
            if (head != RAW) {
                u32 size = 0, signs = __shfl_sync(FULL, word, 0);
                for (u32 k = 0; k < head; k++)
                    size |= ((__shfl_sync(FULL, word, (int)k + 1) >> lane_id()) & 1u) << k;
                v = __fmul_rn((float)((signs >> lane_id()) & 1u ? -(i32)size : (i32)size), width);
            }
            if (at >= n) continue;
            v = __fmul_rn(v, scale);
            out[at] = quiet(accumulate ? __fadd_rn(out[at], v) : v);
        }
    }
}

// --- selection -------------------------------------------------------------------------------------------------------

constexpr int BINS = 2048, BIN_SHIFT = 20;

// counts[b] += number of values whose magnitude has b as its upper 11 bits; bins from 2040 on are not finite.
KERNEL magnitude_histogram(const float* x, i64 n, u64* counts) {
    __shared__ u32 bins[BINS];
    for (int b = threadIdx.x; b < BINS; b += THREADS) bins[b] = 0;
    __syncthreads();
    for (i64 index = first_warp(); index * TILE < n; index += num_warps()) {
        Tile t{index, n, lane_id()};
        float v[EACH];
        load_tile(x, t, v);
        for (int i = 0; i < EACH; i++)
            if (t.place(i / 4) + i % 4 < n) atomicAdd(&bins[magnitude(v[i]) >> BIN_SHIFT], 1u);
    }
    __syncthreads();
    for (int b = threadIdx.x; b < BINS; b += THREADS)
        if (bins[b]) atomicAdd(&counts[b], (u64)bins[b]);
}

// Keys of all values of magnitude >= threshold, in no order, as far as there is room: falling magnitude, then rising
// index. state[0] += their number; state[1] is set where a value is not finite.
KERNEL select_at_least(const float* x, i64 n, i32 threshold, u64* state, i64* keys, i64 room) {
    for (i64 index = first_warp(); index * TILE < n; index += num_warps()) {
        Tile t{index, n, lane_id()};
        float v[EACH];
        load_tile(x, t, v);
        for (int i = 0; i < EACH; i++) {
            i64 at = t.place(i / 4) + i % 4;
            i32 m = magnitude(v[i]);
            u32 taken = __ballot_sync(FULL, at < n && m >= threshold);
            if (!taken) continue;
            u64 first = 0;
            if (t.lane == 0) first = atomicAdd(&state[0], (u64)__popc(taken));
            i64 to = (i64)__shfl_sync(FULL, first, 0) + __popc(taken & ((1u << t.lane) - 1));
            if (((taken >> t.lane) & 1) && to < room) keys[to] = ((i64)(ABS - m) << 32) | at;
            if (m >= INF && at < n) atomicOr((u32*)&state[1], NONFINITE);
        }
    }
}

// --- rows ------------------------------------------------------------------------------------------------------------

// OR of a row over the warp's lanes, in words of 16 bytes where rows begin and end at such.
template <class T>
DEVICE u32 seen_bits(const T* row, i64 width, bool wide) {
    u32 seen = 0;
    if (wide) {
        const uint4* words = (const uint4*)row;
        for (i64 c = lane_id(); c < width * (i64)sizeof(T) / 16; c += WARP)
            seen |= words[c].x | words[c].y | words[c].z | words[c].w;
        if (sizeof(T) == 2) seen |= seen >> 16;
    } else {
        for (i64 c = lane_id(); c < width; c += WARP) seen |= row[c];
    }
    return seen;
}

// bitmap[w], bit i: row 32 w + i has a value whose bits, without the sign, are not zero.
template <class T>
DEVICE void nonzero_rows(const T* matrix, i64 num_rows, i64 width, u32* bitmap) {
    constexpr int AT_ONCE = 4;
    constexpr u32 MAGNITUDE = sizeof(T) == 2 ? 0x7fff : 0x7fffffff;
    bool wide = aligned(matrix, 16) && width * sizeof(T) % 16 == 0;
    for (i64 word = first_warp(); word * WARP < num_rows; word += num_warps()) {
        i64 first = word * WARP;
        u32 bits = 0;
        if (width < WARP) {
            u32 seen = 0;
            if (first + lane_id() < num_rows)
                for (i64 c = 0; c < width; c++) seen |= matrix[(first + lane_id()) * width + c];
            bits = __ballot_sync(FULL, seen & MAGNITUDE);
        } else {
            for (int r = 0; r < WARP; r += AT_ONCE) {
                u32 seen[AT_ONCE];
                for (int i = 0; i < AT_ONCE; i++)
                    seen[i] = first + r + i < num_rows ? seen_bits(matrix + (first + r + i) * width, width, wide) : 0;
                for (int i = 0; i < AT_ONCE; i++) bits |= (u32)__any_sync(FULL, seen[i] & MAGNITUDE) << (r + i);
            }
        }
        if (lane_id() == 0) bitmap[word] = bits;
    }
}

KERNEL nonzero_rows_16(const u16* matrix, i64 num_rows, i64 width, u32* bitmap) {
    nonzero_rows(matrix, num_rows, width, bitmap);
}

KERNEL nonzero_rows_32(const u32* matrix, i64 num_rows, i64 width, u32* bitmap) {
    nonzero_rows(matrix, num_rows, width, bitmap);
}

// A warp works on 32 >> shift rows at a time, 1 << shift lanes each: the fewest that cover a row, at most all.
struct RowLanes {
    int shift;
    DEVICE explicit RowLanes(i64 items) : shift(0) {
        while (shift < 5 && (1 << shift) < items) shift++;
    }
    DEVICE i64 row() const { return (first_warp() << (5 - shift)) + (lane_id() >> shift); }
    DEVICE i64 stride() const { return num_warps() << (5 - shift); }
    DEVICE int first() const { return lane_id() & ((1 << shift) - 1); }
    DEVICE int step() const { return 1 << shift; }
};

// Copy `width` bytes for each of `num` rows: from[index[i]] to to[i], or from[i] to to[index[i]]. All in bytes.
template <class T>
DEVICE void move_rows(
    const u8* from, i64 from_stride, u8* to, i64 to_stride, const i64* index, bool scatter, i64 num, i64 width) {
    RowLanes lanes(width / (i64)sizeof(T));
    for (i64 row = lanes.row(); row < num; row += lanes.stride()) {
        const T* source = (const T*)(from + (scatter ? row : index[row]) * from_stride);
        T* target = (T*)(to + (scatter ? index[row] : row) * to_stride);
        for (i64 c = lanes.first(); c < width / (i64)sizeof(T); c += lanes.step()) target[c] = source[c];
    }
}

DEVICE void move_any_rows(
    const u8* from, i64 from_stride, u8* to, i64 to_stride, const i64* index, bool scatter, i64 num, i64 width) {
    u64 bits = (u64)from | (u64)to | (u64)from_stride | (u64)to_stride | (u64)width;
    if (bits % 16 == 0) {
        move_rows<uint4>(from, from_stride, to, to_stride, index, scatter, num, width);
    } else if (bits % 4 == 0) {
        move_rows<u32>(from, from_stride, to, to_stride, index, scatter, num, width);
    } else {
        move_rows<u16>(from, from_stride, to, to_stride, index, scatter, num, width);
    }
}

KERNEL gather_rows(const u8* source, i64 source_stride, const i64* rows, i64 num, i64 width, u8* out) {
    move_any_rows(source, source_stride, out, width, rows, false, num, width);
}

KERNEL scatter_rows(const u8* values, const i64* positions, i64 num, i64 width, u8* out) {
    move_any_rows(values, width, out, width, positions, true, num, width);
}

// total[positions[i]] += values[i], or = where fresh; positions are unique, so no two lanes meet.
template <class In>
DEVICE void scatter_add_rows(
    float* total, const i64* positions, i64 num, i64 width, const In* values, i64 stride, u8* fresh) {
    RowLanes lanes(width);
    i64 end = (num + (32 >> lanes.shift) - 1) >> (5 - lanes.shift) << (5 - lanes.shift);
    for (i64 row = lanes.row(); row < end; row += lanes.stride()) {
        bool exists = row < num;
        i64 position = exists ? positions[row] : 0;
        bool is_fresh = exists && fresh[position];
        __syncwarp(FULL);
        if (!exists) continue;
        if (is_fresh && lanes.first() == 0) fresh[position] = 0;
        const In* source = values + row * stride;
        float* target = total + position * width;
        for (i64 c = lanes.first(); c < width; c += lanes.step()) {
            float v = widen(source[c]);
            target[c] = is_fresh ? v : quiet(__fadd_rn(target[c], v));
        }
    }
}

KERNEL scatter_add_rows_f32(
    float* total, const i64* positions, i64 num, i64 width, const float* values, i64 stride, u8* fresh) {
    scatter_add_rows(total, positions, num, width, values, stride, fresh);
}

KERNEL scatter_add_rows_bf16(
    float* total, const i64* positions, i64 num, i64 width, const Bf16* values, i64 stride, u8* fresh) {
    scatter_add_rows(total, positions, num, width, values, stride, fresh);
}

// out[s] = the rows order[starts[s]] .. order[starts[s + 1] - 1] of values, added in this order.
template <class In>
DEVICE void sum_segments(
    const In* values, const i64* order, const i64* starts, i64 num_segments, i64 width, float* out) {
    RowLanes lanes(width);
    for (i64 segment = lanes.row(); segment < num_segments; segment += lanes.stride()) {
        i64 begin = starts[segment], end = starts[segment + 1];
#pragma unroll 1
        for (i64 c = lanes.first(); c < width; c += lanes.step()) {
            float sum = widen(values[order[begin] * width + c]);
#pragma unroll 2
            for (i64 i = begin + 1; i < end; i++) sum = quiet(__fadd_rn(sum, widen(values[order[i] * width + c])));
            out[segment * width + c] = sum;
        }
    }
}

KERNEL sum_segments_f32(
    const float* values, const i64* order, const i64* starts, i64 num_segments, i64 width, float* out) {
    sum_segments(values, order, starts, num_segments, width, out);
}

KERNEL sum_segments_bf16(
    const Bf16* values, const i64* order, const i64* starts, i64 num_segments, i64 width, float* out) {
    sum_segments(values, order, starts, num_segments, width, out);
}

// --- sets of ids -----------------------------------------------------------------------------------------------------

constexpr int WORDS_EACH = 4;
constexpr i64 BITMAP_GROUP = THREADS * WORDS_EACH;

KERNEL bitmap_mark(const i64* ids, i64 num, u32* bitmap) {
    for (i64 i = first_thread(); i < num; i += num_threads()) atomicOr(&bitmap[ids[i] >> 5], 1u << (ids[i] & 31));
}

// starts[g]: ones before the 1024 words of group g; starts[number of groups]: all ones.
KERNEL bitmap_count(const u32* bitmap, i64 num_words, i64* starts, u32* ticket) {
    i64 num_groups = (num_words + BITMAP_GROUP - 1) / BITMAP_GROUP;
    for (i64 group = blockIdx.x; group < num_groups; group += gridDim.x) {
        i64 count = 0, total;
        for (int i = 0; i < WORDS_EACH; i++) {
            i64 word = group * BITMAP_GROUP + i * THREADS + threadIdx.x;
            if (word < num_words) count += __popc(bitmap[word]);
        }
        block_prefix(count, &total);
        if (threadIdx.x == 0) starts[group] = total;
    }
    scan_by_last(starts, num_groups, ticket);
}

KERNEL bitmap_list(const u32* bitmap, i64 num_words, const i64* starts, i64* ids) {
    i64 num_groups = (num_words + BITMAP_GROUP - 1) / BITMAP_GROUP;
    for (i64 group = blockIdx.x; group < num_groups; group += gridDim.x) {
        i64 before = starts[group];
        for (int i = 0; i < WORDS_EACH; i++) {
            i64 word = group * BITMAP_GROUP + i * THREADS + threadIdx.x, total;
            u32 bits = word < num_words ? bitmap[word] : 0;
            i64 to = before + block_prefix(__popc(bits), &total);
            for (; bits; bits &= bits - 1) ids[to++] = word * 32 + __ffs((i32)bits) - 1;
            before += total;
        }
    }
}

// --- owners ----------------------------------------------------------------------------------------------------------

struct Network {  // four rounds over the two halves of a position
    u32 low_bits, high_mask, low_mask, key0, key1, key2, key3;
};

DEVICE u64 permute(u64 x, Network f, bool inverse) {
    u32 high = (u32)(x >> f.low_bits), low = (u32)x & f.low_mask;
    if (inverse) {
        low ^= finalise(high ^ f.key3) & f.low_mask;
        high ^= finalise(low ^ f.key2) & f.high_mask;
        low ^= finalise(high ^ f.key1) & f.low_mask;
        high ^= finalise(low ^ f.key0) & f.high_mask;
    } else {
        high ^= finalise(low ^ f.key0) & f.high_mask;
        low ^= finalise(high ^ f.key1) & f.low_mask;
        high ^= finalise(low ^ f.key2) & f.high_mask;
        low ^= finalise(high ^ f.key3) & f.low_mask;
    }
    return ((u64)high << f.low_bits) | low;
}

KERNEL hashed_split(
    const i64* ids, i64 num, u64 num_positions, u32 num_owners, u32 low_bits, u32 high_mask, u32 low_mask, u32 key0,
    u32 key1, u32 key2, u32 key3, i32* owners, i64* slots) {
    Network f{low_bits, high_mask, low_mask, key0, key1, key2, key3};
    for (i64 i = first_thread(); i < num; i += num_threads()) {
        u64 x = (u64)ids[i];
        do x = permute(x, f, false);
        while (x >= num_positions);
        slots[i] = (i64)(x / num_owners);
        owners[i] = (i32)(x % num_owners);
    }
}

KERNEL hashed_join(
    const i64* slots, i64 num, u64 num_positions, u32 num_owners, u32 owner, u32 low_bits, u32 high_mask, u32 low_mask,
    u32 key0, u32 key1, u32 key2, u32 key3, i64* ids) {
    Network f{low_bits, high_mask, low_mask, key0, key1, key2, key3};
    for (i64 i = first_thread(); i < num; i += num_threads()) {
        u64 x = (u64)slots[i] * num_owners + owner;
        do x = permute(x, f, true);
        while (x >= num_positions);
        ids[i] = (i64)x;
    }
}

constexpr i64 PARTITION_TILE = 2048;  // entries a warp takes in order

// starts[owner * num_tiles + tile]: where the entries of this owner in this tile go; starts[last]: their number.
KERNEL partition_count(const i32* owners, i64 num, i32 num_owners, i64* starts, u32* ticket) {
    DYNAMIC_SHARED(u32, shared);
    u32* counts = shared + warp_id() * num_owners;
    i64 num_tiles = (num + PARTITION_TILE - 1) / PARTITION_TILE;
    for (i64 tile = first_warp(); tile < num_tiles; tile += num_warps()) {
        for (int o = lane_id(); o < num_owners; o += WARP) counts[o] = 0;
        __syncwarp(FULL);
        i64 end = lesser((tile + 1) * PARTITION_TILE, num);
        for (i64 i = tile * PARTITION_TILE + lane_id(); i < end; i += WARP) atomicAdd(&counts[owners[i]], 1u);
        __syncwarp(FULL);
        for (int o = lane_id(); o < num_owners; o += WARP) starts[o * num_tiles + tile] = counts[o];
        __syncwarp(FULL);
    }
    scan_by_last(starts, num_owners * num_tiles, ticket);
}

KERNEL partition_scatter(const i32* owners, i64 num, i32 num_owners, const i64* starts, i64* order) {
    DYNAMIC_SHARED(i64, cursors);
    i64* cursor = cursors + warp_id() * num_owners;
    i64 num_tiles = (num + PARTITION_TILE - 1) / PARTITION_TILE;
    for (i64 tile = first_warp(); tile < num_tiles; tile += num_warps()) {
        for (int o = lane_id(); o < num_owners; o += WARP) cursor[o] = starts[o * num_tiles + tile];
        __syncwarp(FULL);
        i64 end = lesser((tile + 1) * PARTITION_TILE, num);
        for (i64 base = tile * PARTITION_TILE; base < end; base += WARP) {
            i64 i = base + lane_id();
            i32 owner = i < end ? owners[i] : -1;
            u32 peers = __match_any_sync(FULL, owner), below = peers & ((1u << lane_id()) - 1);
            i64 to = owner < 0 ? 0 : cursor[owner] + __popc(below);
            __syncwarp(FULL);
            if (owner >= 0) {
                order[to] = i;
                if (!below) cursor[owner] += __popc(peers);
            }
            __syncwarp(FULL);
        }
    }
}
