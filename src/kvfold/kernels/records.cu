// Decode attention over coded tokens, by the integer tensor cores. See records.py for the mathematics and codecs/fragments.py for the records.
//
// A record holds 64 tokens of one KV head, codes in the order of the left operand of mma.sync, so that a few masks and byte permutations
// turn a warp's registers of codes into registers of 8-bit levels: S^T = K q^T, then O^T = V^T P^T, nothing dequantised in memory.
//  * Queries become 16-bit integers of one scale for each head and group of tiles. Their high and low bytes sit in neighbouring columns of the
//    right operand: the eight columns are four heads, and S = 256 high + low is exact. So do softmax weights, of one scale for each record.
//  * Every warp has a ring of records in shared memory, filled by bulk copies; no barrier of the block in the loop. Records are dealt out in turn.
//  * The reference of the softmax moves only when a warp's sum of weights passes 10^24, far below what a float holds.
//  * One launch: the last block of a (row, KV head) merges what the others found.
//  * Logit biases lie in the order of the records and are asked for one record ahead, or are those of a vector that RoPE turns:
//    S += [fine turns of the record's 64 tokens] [factors of the queries, turned back to the record's first], the latter as sums of two
//    numbers of 16 bits.
// Compiled for one HEAD_DIM, SETS of four query heads, WARPS a block, and no BIAS (0), one beside the records (1), or that of as many
// planes of a turned vector (16, 32).
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#define DEVICE __device__ __forceinline__

constexpr int TILES = HEAD_DIM / 16, HEADS = SETS * 4, TOKENS = 64, THREADS = WARPS * 32;
constexpr int TILE_BYTES = TOKENS * 16 / 8, BOOK = 32, MOST_SPLITS = 128, MOST_STAGES = 4, IN_FLIGHT = 65536;
constexpr int PLANES = BIAS > 1 ? BIAS : 0;
[[maybe_unused]] constexpr int STEPS = PLANES / 8;
constexpr int PASSES = (HEAD_DIM + 127) / 128, HEADS_A_WARP = (HEADS + WARPS - 1) / WARPS;
constexpr uint32_t LOW_ONES = TILES >= 8 ? 0x11111111u : ((1u << 4 * (TILES & 7)) - 1) / 15, HIGH_ONES = TILES > 8 ? 0x11111111u >> 4 * (16 - TILES) : 0;
constexpr float NOTHING = -1e30f, FAR = 1e24f;
enum Flag { KEY_NORMS = 1, MAGNITUDES = 2, LOGARITHMS = 4 };

struct Work {    // of one block: records of one format; mirrored in record_plan.py, Problem in records.py
  int head, index, splits, first_slot;          // (row, KV head), the block's place among those of that head, their number, its first slot
  int run_index, run_blocks, records, tokens;   // likewise within the run of records; tokens of the last record
  int begin, units;                             // where the run begins, and a record's size, in units of 16 bytes
  uint32_t widths[2];                           // of the tiles of keys, four bits each
  int value_width, flags, place, first;         // place: the run's first token among those of all heads; first: its first that is seen
};

struct Problem {
  const float* query;     // (row heads, group, HEAD_DIM)
  const uint8_t* records;
  const uint8_t* books;   // (row heads, TILES + 1, BOOK)
  const Work* work;       // (blocks,) or null: all row heads have the same runs
  const float* bias;      // BIAS 1: (places, group)
  const int* table;       // (records of all row heads,) or null: where each lies, in units of 16 bytes, if not behind the one before
  const float2* factors;  // PLANES: (row heads, group, PLANES), of the cosine and the sine of a token's place in its head
  const int2* channels;   // PLANES: (row heads, PLANES), the first and second channel of each plane
  const float2* coarse;   // PLANES: (turns, HEAD_DIM), cosine and sine at every 64th token, at first channels
  const float* fine;      // PLANES: (64, fine_stride), halves; cosines at first channels and sines at second ones
  float* partial;         // (slots, group, HEAD_DIM)
  float2* partial_sums;   // (slots, group): reference, sum
  int* arrived;           // (row heads,), zero between launches
  float* output;          // (row heads, group, HEAD_DIM)
  float* lse;             // (row heads, group)
  int group, ring_bytes, turns, fine_stride;
  float scaling;          // times log2(e)
  Work common;            // where work is null
};
static_assert(sizeof(Problem) == 15 * 8 + 6 * 4 + 16 * 4, "as Python's mirror, which is padded to eight bytes");

// ---- instructions ----

DEVICE uint32_t address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DEVICE void barrier_init(uint32_t a) { asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(a)); }
DEVICE void barrier_expect(uint32_t a, uint32_t n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(a), "r"(n) : "memory");
}
DEVICE void barrier_wait(uint32_t a, uint32_t phase) {
  asm volatile("{\n.reg .pred p;\nW:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra D;\nbra W;\nD:\n}" ::"r"(a), "r"(phase) : "memory");
}
DEVICE void bulk_copy(uint32_t to, const void* from, uint32_t n, uint32_t barrier, uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to), "l"(from), "r"(n), "r"(barrier), "l"(policy) : "memory");
}
DEVICE uint4 shared128(uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a) : "memory");
  return v;
}
DEVICE uint2 shared64(uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
DEVICE uint32_t shared32(uint32_t a) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
DEVICE float4 global128(const float* p) {   // volatile: stays ahead of the bulk copies, behind which it would wait
  float4 v;
  asm volatile("ld.global.nc.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p));
  return v;
}
DEVICE float2 global64(const float2* p) {   // volatile: ahead of the wait for a record
  float2 v;
  asm volatile("ld.global.nc.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
  return v;
}
DEVICE float global32(const float* p) {   // likewise, of what is read once
  float v;
  asm volatile("ld.global.nc.L1::no_allocate.f32 %0, [%1];" : "=f"(v) : "l"(p));
  return v;
}
DEVICE void wait_for_launch_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
template <bool SIGNED> DEVICE void mma_keys(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t b) {
  if (SIGNED) asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
  else asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void mma_keys_twice(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b) {   // both left operands by b
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%8}, {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b));
}
template <bool SIGNED> DEVICE void mma_values(int (&c)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  if (SIGNED) asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEVICE void mma_turns(float (&c)[4], const uint4& a, const uint32_t (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b[0]), "r"(b[1]));
}
DEVICE uint32_t halves(float x, float y) { const __half2 h = __floats2half2_rn(x, y); return *reinterpret_cast<const uint32_t*>(&h); }
DEVICE uint32_t rests(float x, float y) {   // what `halves` leaves, in halves
  const float2 near = __half22float2(__floats2half2_rn(x, y));
  return halves(x - near.x, y - near.y);
}
DEVICE float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float log2_fast(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float inverse_of(float x) { float y; asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return x > 0.f ? y : 0.f; }
DEVICE uint32_t transpose(uint32_t x) { uint32_t y; asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x)); return y; }
DEVICE uint32_t permute(uint32_t a, uint32_t b, uint32_t s) { uint32_t y; asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(s)); return y; }
DEVICE float max_over_rows(float x) {   // over the eight lanes of a column pair
#pragma unroll
  for (int o = 4; o < 32; o *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, o));
  return x;
}
DEVICE float sum_over_rows(float x) {
#pragma unroll
  for (int o = 4; o < 32; o *= 2) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// ---- codes to levels ----

// prmt looks four codes up at once, among eight bytes; where bit 3 of a code is set it repeats the byte's highest bit instead. Width 4 has
// two tables: levels of codes 0 to 7, all negative, and of 8 to 15 plus one, none negative. The wrong one then gives -1 and 0, so that the
// sum of both products is that of the level. Width 8 is its own level plus 127.5, which exact sums take out.
template <int W> constexpr bool is_signed = W != 8;
DEVICE int without_offset(int sum) { return (255 * sum) >> 1; }

// A warp's 32 codes a lane, as eight registers of four levels; of width 4, of the second table in `b`.
template <int W> DEVICE void levels(uint32_t (&a)[8], uint32_t (&b)[8], uint32_t codes, uint32_t book, int lane) {
  if (W == 8) {
    const uint4 u = shared128(codes + lane * 16), v = shared128(codes + 512 + lane * 16);
    a[0] = u.x; a[1] = u.y; a[2] = u.z; a[3] = u.w; a[4] = v.x; a[5] = v.y; a[6] = v.z; a[7] = v.w;
  } else if (W == 4) {
    const uint4 u = shared128(codes + lane * 16), t = shared128(book);
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t x = w[i] ^ 0x88888888u;
      a[2 * i] = permute(t.x, t.y, w[i]); a[2 * i + 1] = permute(t.x, t.y, w[i] >> 16);
      b[2 * i] = permute(t.z, t.w, x); b[2 * i + 1] = permute(t.z, t.w, x >> 16);
    }
  } else {
    uint32_t w[4];
    uint2 t;
    if (W == 3) {
      const uint2 u = shared64(codes + lane * 8);
      const uint32_t v = shared32(codes + 256 + lane * 4);
      t = shared64(book + 16);
      w[0] = u.x & 0x77777777u; w[1] = u.y & 0x77777777u; w[2] = v & 0x77777777u;
      w[3] = ((u.x >> 3) & 0x11111111u) | ((u.y >> 2) & 0x22222222u) | ((v >> 1) & 0x44444444u);
    } else if (W == 2) {
      const uint2 u = shared64(codes + lane * 8);
      t.x = t.y = shared32(book + 24);
      w[0] = u.x & 0x33333333u; w[1] = (u.x >> 2) & 0x33333333u; w[2] = u.y & 0x33333333u; w[3] = (u.y >> 2) & 0x33333333u;
    } else {
      const uint32_t u = shared32(codes + lane * 4);
      t.x = t.y = shared32(book + 28);
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = (u >> i) & 0x11111111u;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) { a[2 * i] = permute(t.x, t.y, w[i]); a[2 * i + 1] = permute(t.x, t.y, w[i] >> 16); }
  }
}

// Eight numbers of one kind, of tokens 16 i + 8 j + row: floats, or logarithms in sixteenths of an octave.
DEVICE void numbers(float (&x)[4][2], uint32_t from, int row, bool logarithms) {
  if (logarithms) {
    const uint2 u = shared64(from + row * 8);
#pragma unroll
    for (int i = 0; i < 8; i++) {   // a byte in the mantissa of 2^23
      const float y = __uint_as_float(permute(i < 4 ? u.x : u.y, 0x4b000000u, 0x7440 + i % 4));
      x[i / 2][i % 2] = exp2_fast(fmaf(y, 0.0625f, -524288.f - 8.f));
    }
  } else {
    const uint4 u = shared128(from + row * 16);
    const uint32_t w[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
    for (int i = 0; i < 4; i++) { const float2 f = __half22float2(*reinterpret_cast<const __half2*>(&w[i])); x[i][0] = f.x; x[i][1] = f.y; }
  }
}
DEVICE void ones(float (&x)[4][2]) {
#pragma unroll
  for (int i = 0; i < 8; i++) x[i / 2][i % 2] = 1.f;
}

// ---- tiles of keys, all tiles of values ----

// N tiles of one width that follow each other. Without branches between them, loads go ahead of products.
template <int W, int N> DEVICE void keys(int (&c)[SETS][4][4], int (&offset)[SETS], uint32_t codes, uint32_t books, uint32_t query, uint32_t sums, int lane) {
#pragma unroll
  for (int tile = 0; tile < N; tile++) {
    uint32_t a[8], b[8];
    levels<W>(a, b, codes + tile * W * TILE_BYTES, books + tile * BOOK, lane);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      const uint32_t q = shared32(query + (s * TILES + tile) * 128);
      if (!is_signed<W>) offset[s] += without_offset((int)shared32(sums + (s * 4 * TILES + tile) * 4));
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (W == 4) mma_keys_twice(c[s][i], a[2 * i], a[2 * i + 1], b[2 * i], b[2 * i + 1], q);
        else mma_keys<is_signed<W>>(c[s][i], a[2 * i], a[2 * i + 1], q);
      }
    }
  }
}

template <int W> DEVICE void values(float (&o)[SETS][TILES][2], float (&offset)[SETS], uint32_t codes, uint32_t book, const uint32_t (&p)[SETS][4], const float (&unit)[SETS], int lane) {
  if (!is_signed<W>) {
    const uint32_t one[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      int y[4] = {0, 0, 0, 0};
      mma_values<false>(y, one, p[s][0], p[s][1]);
      mma_values<false>(y, one, p[s][2], p[s][3]);
      offset[s] = fmaf((float)(y[0] * 256 + y[1]), unit[s] * 127.5f, offset[s]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILES; tile++) {
    uint32_t a[8], b[8];
    levels<W>(a, b, codes + tile * W * TILE_BYTES, book, lane);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      int x[4] = {0, 0, 0, 0};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        mma_values<is_signed<W>>(x, a + 4 * half, p[s][2 * half], p[s][2 * half + 1]);
        if (W == 4) mma_values<true>(x, b + 4 * half, p[s][2 * half], p[s][2 * half + 1]);
      }
      o[s][tile][0] = fmaf((float)(x[0] * 256 + x[1]), unit[s], o[s][tile][0]);
      o[s][tile][1] = fmaf((float)(x[2] * 256 + x[3]), unit[s], o[s][tile][1]);
    }
  }
}

// ---- the logits of a turned vector ----

#if BIAS > 1
struct Circles {   // of one (row, KV head), in shared memory
  __align__(16) uint32_t near[4][STEPS][32][4];   // fine turns as the left operand: sixteen tokens, eight planes
  float2 factors[HEADS][PLANES];
  int firsts[PLANES];

  DEVICE void fill(const Problem& p, int head, float unit) {   // by the whole block
    const int2* channels = p.channels + (size_t)head * PLANES;
    if (threadIdx.x < PLANES) firsts[threadIdx.x] = __ldg(channels + threadIdx.x).x;
    for (int k = threadIdx.x; k < 4 * STEPS * 128; k += THREADS) {   // register r of a lane
      const int r = k & 3, lane = k >> 2 & 31, step = k / 128 % STEPS, tile = k / 128 / STEPS;
      const int2 channel = __ldg(channels + step * 8 + (r >> 1) * 4 + (lane & 3));
      const float* row = p.fine + (tile * 16 + (r & 1) * 8 + (lane >> 2)) * p.fine_stride;
      near[tile][step][lane][r] = halves(__ldg(row + channel.x), __ldg(row + channel.y));
    }
    wait_for_launch_before();   // which may still be writing factors
    for (int k = threadIdx.x; k < HEADS * PLANES; k += THREADS) {
      const float2 f = k < p.group * PLANES ? global64(p.factors + (size_t)head * p.group * PLANES + k) : float2{0.f, 0.f};
      factors[k / PLANES][k % PLANES] = {f.x * unit, f.y * unit};
    }
  }
  // Of planes t, t + 4, ... to the first of 64 tokens.
  DEVICE void turn(float2 (&turns)[2 * STEPS], const float2* coarse, int index, int t) const {
    const float2* from = coarse + (size_t)index * HEAD_DIM;
#pragma unroll
    for (int k = 0; k < 2 * STEPS; k++) turns[k] = global64(from + firsts[4 * k + t]);
  }
  // Right operand of a set: halves of head 0, rests of head 0, halves of head 1, ...
  DEVICE void turned(uint32_t (&b)[STEPS][2], const float2 (&turns)[2 * STEPS], int set, int lane) const {
    const int g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int k = 0; k < 2 * STEPS; k++) {
      const float2 f = factors[set * 4 + (g >> 1)][4 * k + t];
      const float x = fmaf(f.x, turns[k].x, f.y * turns[k].y), y = fmaf(f.y, turns[k].x, -f.x * turns[k].y);
      b[k / 2][k % 2] = g & 1 ? rests(x, y) : halves(x, y);
    }
  }
  // A lane has head t of each set, tokens 16 i + 8 j + g.
  DEVICE void logits(float (&v)[SETS][4][2], const float2 (&turns)[2 * STEPS], int lane) const {
    const uint32_t near_at = address(near) + lane * 16;
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      uint32_t b[STEPS][2];
      turned(b, turns, s, lane);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float d[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int j = 0; j < STEPS; j++) mma_turns(d, shared128(near_at + (k * STEPS + j) * 512), b[j]);
        v[s][k][0] = d[0] + d[1]; v[s][k][1] = d[2] + d[3];
      }
    }
  }
};

#if WARPS == 8
// All of them at the places of the records, for tokens that do not lie in order: p.lse is (places, group). A warp takes the positions of
// TOGETHER coarse turns, for which fine turns are read once, and then their tokens, which lie together in each run.
// runs: (row heads + 1,), the first run of each; begins: (runs, turns + 1), the first place whose token is that far; positions: (places,)
// or null where a head's tokens lie in order from a whole record on.
constexpr int TOGETHER = 4 / SETS;   // shared memory is 48 kB
constexpr int SOME_RUNS = 32 / TOGETHER, LANE_TOKENS = TOGETHER * TOKENS / 32;
__global__ void __launch_bounds__(THREADS, 2) turned_biases(const Problem p, const int* positions, const int* runs, const int* begins, int turns_a_block) {
  __shared__ Circles circles;
  __shared__ __align__(16) float found[WARPS][TOGETHER][TOKENS][HEADS];
  __shared__ int2 spans[WARPS][32];   // of tokens that lie together: how far the first's place is from its number, and the turn
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, head = blockIdx.y;
  circles.fill(p, head, 1.f);
  asm volatile("griddepcontrol.launch_dependents;");
  __syncthreads();
  const uint32_t near_at = address(circles.near) + lane * 16;
  const uint32_t below = (1u << lane) - 1;
  int firsts[2 * STEPS];
#pragma unroll
  for (int k = 0; k < 2 * STEPS; k++) firsts[k] = circles.firsts[4 * k + t];
  const int start = blockIdx.x * turns_a_block, stop = min(p.turns, start + turns_a_block), first_run = __ldg(runs + head), last_run = __ldg(runs + head + 1);
  for (int i = start + warp * TOGETHER; i < stop; i += WARPS * TOGETHER) {
    float2 turns[TOGETHER][2 * STEPS];
#pragma unroll
    for (int n = 0; n < TOGETHER; n++)
#pragma unroll
      for (int k = 0; k < 2 * STEPS; k++) turns[n][k] = global64(p.coarse + (size_t)min(i + n, stop - 1) * HEAD_DIM + firsts[k]);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      uint32_t b[TOGETHER][STEPS][2];
#pragma unroll
      for (int n = 0; n < TOGETHER; n++) circles.turned(b[n], turns[n], s, lane);
#pragma unroll
      for (int k = 0; k < 4; k++) {
        float d[TOGETHER][4] = {};
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
          const uint4 a = shared128(near_at + (k * STEPS + j) * 512);
#pragma unroll
          for (int n = 0; n < TOGETHER; n++) mma_turns(d[n], a, b[n][j]);
        }
#pragma unroll
        for (int n = 0; n < TOGETHER; n++) {
          found[warp][n][16 * k + g][s * 4 + t] = d[n][0] + d[n][1];
          found[warp][n][16 * k + 8 + g][s * 4 + t] = d[n][2] + d[n][3];
        }
      }
    }
    __syncwarp();
    for (int run = first_run; run < last_run; run += SOME_RUNS) {
      // A lane has the places of one turn in one run; then the tokens of all of them are dealt to lanes.
      const int own_run = run + lane % SOME_RUNS, own_turn = i + lane / SOME_RUNS;
      int begin = 0, count = 0;
      if (own_run < last_run && own_turn < stop) {
        const int* from = begins + (size_t)own_run * (p.turns + 1) + own_turn;
        begin = __ldg(from);
        count = __ldg(from + 1) - begin;
      }
      int before = count;
#pragma unroll
      for (int o = 1; o < 32; o *= 2) {
        const int other = __shfl_up_sync(~0u, before, o);
        if (lane >= o) before += other;
      }
      const int all = __shfl_sync(~0u, before, 31);
      before -= count;
      const uint32_t some = __ballot_sync(~0u, count > 0);
      if (count > 0) spans[warp][__popc(some & below)] = {begin - before, own_turn - i};
      __syncwarp();
      int span = -1;
      for (int base = 0; base < all; base += 32 * LANE_TOKENS) {
        int place[LANE_TOKENS], row[LANE_TOKENS];
#pragma unroll
        for (int k = 0; k < LANE_TOKENS; k++) {
          const int first = before - base - 32 * k, token = base + 32 * k + lane;
          const uint32_t starts = __reduce_or_sync(~0u, count > 0 && first >= 0 && first < 32 ? 1u << first : 0);
          const int2 own = spans[warp][max(span + __popc(starts & (below << 1 | 1)), 0)];
          span += __popc(starts);
          place[k] = own.x + token;
          row[k] = own.y * TOKENS + (positions && token < all ? __ldg(positions + place[k]) : place[k]) % TOKENS;
        }
#pragma unroll
        for (int k = 0; k < LANE_TOKENS; k++) {
          if (base + 32 * k + lane >= all) break;
          const float* from = found[warp][0][row[k]];
          float* to = p.lse + (size_t)place[k] * p.group;
          if (p.group % 4 == 0) for (int h = 0; h < p.group; h += 4) *reinterpret_cast<float4*>(to + h) = *reinterpret_cast<const float4*>(from + h);
          else for (int h = 0; h < p.group; h++) to[h] = from[h];
        }
      }
      __syncwarp();
    }
  }
}
#endif
#endif

// ---- the kernel ----

struct Shared {   // behind the rings
  uint64_t barriers[WARPS][MOST_STAGES];
  uint32_t query[SETS][TILES][32];   // right operand: a lane has column lane / 4 and channels 4 (lane % 4) ...
  int sums[HEADS][TILES];            // of the query's integers
  float scales[HEADS][TILES];        // of the tile's group
  __align__(16) uint8_t books[(TILES + 1) * BOOK];
#if BIAS > 1
  Circles circles;
#endif
  int last;
};

__global__ void __launch_bounds__(THREADS) attend(const Problem p) {
  extern __shared__ __align__(128) uint8_t rings[];
  Shared& sh = *reinterpret_cast<Shared*>(rings + WARPS * p.ring_bytes);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  __align__(16) Work w = p.common;
  if (p.work) {
    const int4* from = reinterpret_cast<const int4*>(p.work + blockIdx.x);
#pragma unroll
    for (int i = 0; i < 4; i++) reinterpret_cast<int4*>(&w)[i] = __ldg(from + i);
  } else {
    w.head = blockIdx.x / w.splits;
    w.index = w.run_index = blockIdx.x - w.head * w.splits;
    w.first_slot = w.head * w.splits;
    w.begin = w.head * w.records * w.units;
    w.place = w.head * w.records * TOKENS;
  }
  const int start = warp * w.run_blocks + w.run_index, step = WARPS * w.run_blocks;
  const int count = start < w.records ? (w.records - start + step - 1) / step : 0;
  uint8_t* ring = rings + warp * p.ring_bytes;
  const uint32_t ring_at = address(ring), barriers = address(sh.barriers[warp]);
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  const uint8_t* source = p.records + ((size_t)(uint32_t)w.begin + (size_t)start * w.units) * 16;
  const int record_bytes = w.units * 16;
  // Records of a warp on their way: two and more, of all warps about what hides the memory's latency, as far as there is room.
  const int stages = min(min(p.ring_bytes / record_bytes, MOST_STAGES), max(2, (IN_FLIGHT + WARPS * record_bytes - 1) / (WARPS * record_bytes)));
  auto fetch = [&](int i, int stage) {
    barrier_expect(barriers + 8 * stage, record_bytes);
    const uint8_t* from = p.table ? p.records + (size_t)(uint32_t)__ldg(p.table + w.place / TOKENS + start + i * step) * 16 : source + (size_t)i * step * record_bytes;
    bulk_copy(ring_at + stage * record_bytes, from, record_bytes, barriers + 8 * stage, policy);
  };

  const uint8_t* books = p.books + (size_t)w.head * (TILES + 1) * BOOK;
  const float4 book = threadIdx.x < (TILES + 1) * BOOK / 16 ? global128((const float*)books + threadIdx.x * 4) : float4{0, 0, 0, 0};
  const int own = lane < TILES ? __ldg(books + lane * BOOK + 30) : -1;    // the group of tile `lane`
  if (lane < stages) {
    barrier_init(barriers + 8 * lane);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    if (lane < count) fetch(lane, lane);
  }
  // What a launch before this one may still be writing: queries of the heads that this warp prepares, biases, factors.
  wait_for_launch_before();
  float x[HEADS_A_WARP][PASSES][4];
#pragma unroll
  for (int k = 0; k < HEADS_A_WARP; k++)
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int h = warp + k * WARPS, channel = i * 128 + lane * 4;
      const float4 v = h < p.group && channel < HEAD_DIM ? global128(p.query + ((size_t)w.head * p.group + h) * HEAD_DIM + channel) : float4{0, 0, 0, 0};
      x[k][i][0] = v.x; x[k][i][1] = v.y; x[k][i][2] = v.z; x[k][i][3] = v.w;
    }
  __syncwarp();
  const int after = __shfl_down_sync(~0u, own, 1);
  const uint32_t ends = __ballot_sync(~0u, lane < TILES && own != after);   // last tiles of groups
  static_assert(TILES < 32, "the last tile is compared with none");

  // ---- queries to integers ----
#pragma unroll
  for (int k = 0; k < HEADS_A_WARP; k++) {
    const int h = warp + k * WARPS;
    if (h >= HEADS) break;
    float most[PASSES];
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      most[i] = fmaxf(fmaxf(fabsf(x[k][i][0]), fabsf(x[k][i][1])), fmaxf(fabsf(x[k][i][2]), fabsf(x[k][i][3])));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 1));
      most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], 2));
    }
#pragma unroll
    for (int i = 0; i < PASSES; i++) {
      const int tile = i * 8 + g, group = __shfl_sync(~0u, own, tile & 31);
      float peak = 1e-30f;
#pragma unroll
      for (int other = 0; other < TILES; other++) {
        const float theirs = __shfl_sync(~0u, most[other / 8], (other % 8) * 4);
        if (__shfl_sync(~0u, own, other) == group) peak = fmaxf(peak, theirs);
      }
      uint32_t high = 0, low = 0;
      int sum = 0;
#pragma unroll
      for (int b = 0; b < 4; b++) {
        const int v = __float2int_rn(x[k][i][b] * (32512.f * inverse_of(peak))), up = (v + 128) >> 8;
        sum += v;
        high |= (uint32_t)(up & 255) << (8 * b);
        low |= (uint32_t)((v - up * 256) & 255) << (8 * b);
      }
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      if (tile < TILES) {
        sh.query[h / 4][tile][(h % 4) * 8 + t] = high;
        sh.query[h / 4][tile][(h % 4) * 8 + 4 + t] = low;
        if (t == 0) { sh.sums[h][tile] = sum; sh.scales[h][tile] = peak * (1.f / 32512.f) * p.scaling; }
      }
    }
  }
  if (threadIdx.x < (TILES + 1) * BOOK / 16) reinterpret_cast<float4*>(sh.books)[threadIdx.x] = book;
#if BIAS > 1
  sh.circles.fill(p, w.head, 1.4426950408889634f);
#endif
  __syncthreads();

  float o[SETS][TILES][2], m[SETS], l[SETS], offset[SETS];
#pragma unroll
  for (int s = 0; s < SETS; s++) {
    m[s] = NOTHING; l[s] = offset[s] = 0.f;
#pragma unroll
    for (int i = 0; i < TILES; i++) o[s][i][0] = o[s][i][1] = 0.f;
  }
  const uint32_t query_at = address(sh.query) + lane * 4, sums_at = address(sh.sums) + t * TILES * 4, scales_at = address(sh.scales) + t * TILES * 4, books_at = address(sh.books);
  const int norms = w.flags & KEY_NORMS ? __popc(ends) : 0, array = w.flags & LOGARITHMS ? TOKENS : 2 * TOKENS;
  const uint32_t key_codes = (norms + (w.flags & MAGNITUDES ? 1 : 0)) * array;
  const int only = w.widths[0] == (w.widths[0] & 15) * LOW_ONES && w.widths[1] == (w.widths[0] & 15) * HIGH_ONES && __popc(ends) == 1 ? w.widths[0] & 15 : 0;
  const int end = (w.records - 1) * TOKENS + w.tokens;
  int stage = 0;
  uint32_t phase = 0;
#if BIAS > 1
  float2 turns[2 * STEPS];
  if (count) sh.circles.turn(turns, p.coarse, start, t);
#elif BIAS == 1
  float bias[SETS][8];   // of the record that comes next
  auto ask = [&](int i) {
    const float* from = p.bias + ((size_t)w.place + (size_t)(start + i * step) * TOKENS + g) * p.group;
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
      for (int k = 0; k < 8; k++) bias[s][k] = global32(from + 8 * k * p.group + min(s * 4 + t, p.group - 1));
  };
  if (count) ask(0);
#endif
  for (int i = 0; i < count; i++) {
    barrier_wait(barriers + 8 * stage, phase);
    const uint32_t base = ring_at + stage * record_bytes;
    uint32_t meta = base, codes = base + key_codes;

    // ---- logits: a lane has head t of each set, tokens 16 i + 8 j + g
    float v[SETS][4][2];
#if BIAS > 1
    sh.circles.logits(v, turns, lane);
    if (i + 1 < count) sh.circles.turn(turns, p.coarse, start + (i + 1) * step, t);
#else
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
      for (int k = 0; k < 8; k++)
#if BIAS == 1
        v[s][k / 2][k % 2] = bias[s][k] * 1.4426950408889634f;
    if (i + 1 < count) ask(i + 1);
#else
        v[s][k / 2][k % 2] = 0.f;
#endif
#endif
    {
      int c[SETS][4][4], taken[SETS];
#pragma unroll
      for (int s = 0; s < SETS; s++) {
        taken[s] = 0;
#pragma unroll
        for (int k = 0; k < 4; k++) c[s][k][0] = c[s][k][1] = c[s][k][2] = c[s][k][3] = 0;
      }
      auto finish = [&](int tile) {   // a group: its norms, then none of its sums are left
        float n[4][2];
        if (norms) { numbers(n, meta, g, w.flags & LOGARITHMS); meta += array; } else ones(n);
#pragma unroll
        for (int s = 0; s < SETS; s++) {
          const float scale = __uint_as_float(shared32(scales_at + (s * 4 * TILES + tile) * 4));
#pragma unroll
          for (int k = 0; k < 8; k++) {
            int (&own)[4] = c[s][k / 2];
            const float x = (float)(own[2 * (k % 2)] * 256 + own[2 * (k % 2) + 1] - taken[s]);
            v[s][k / 2][k % 2] = fmaf(x, scale * n[k / 2][k % 2], v[s][k / 2][k % 2]);
            own[2 * (k % 2)] = own[2 * (k % 2) + 1] = 0;
          }
          taken[s] = 0;
        }
      };
#define TILES_OF(W, N) keys<W, N>(c, taken, codes, book_at, tile_at, sum_at, lane)
      if (only) {
        const uint32_t book_at = books_at, tile_at = query_at, sum_at = sums_at;
        if (only == 4) TILES_OF(4, TILES);
        else if (only == 3) TILES_OF(3, TILES);
        else if (only == 2) TILES_OF(2, TILES);
        else if (only == 8) TILES_OF(8, TILES);
        else TILES_OF(1, TILES);
        codes += only * TILES * TILE_BYTES;
      } else {
        uint64_t widths = (uint64_t)w.widths[1] << 32 | w.widths[0];
#pragma unroll 1
        for (int tile = 0; tile < TILES;) {
          const int width = (int)(widths & 15);
          const uint32_t book_at = books_at + tile * BOOK, tile_at = query_at + tile * 128, sum_at = sums_at + tile * 4;
          const bool two = tile + 1 < TILES && (int)(widths >> 4 & 15) == width && !(ends >> tile & 1);
          if (width == 4) { if (two) TILES_OF(4, 2); else TILES_OF(4, 1); }
          else if (width == 3) { if (two) TILES_OF(3, 2); else TILES_OF(3, 1); }
          else if (width == 2) { if (two) TILES_OF(2, 2); else TILES_OF(2, 1); }
          else if (width == 8) { if (two) TILES_OF(8, 2); else TILES_OF(8, 1); }
          else if (width == 1) { if (two) TILES_OF(1, 2); else TILES_OF(1, 1); }
          const int done = two ? 2 : 1;
          codes += done * width * TILE_BYTES;
          widths >>= 4 * done;
          tile += done;
          if (ends >> (tile - 1) & 1 && tile < TILES) finish(tile - 1);
        }
      }
#undef TILES_OF
      finish(TILES - 1);
    }
    const int from = w.first - (start + i * step) * TOKENS, to = end - (start + i * step) * TOKENS;
    if (from > 0 || to < TOKENS) {
#pragma unroll
      for (int s = 0; s < SETS; s++)
#pragma unroll
        for (int k = 0; k < 8; k++) if (8 * k + g < from || 8 * k + g >= to) v[s][k / 2][k % 2] = -__int_as_float(0x7f800000);
    }

    // ---- softmax, weights times magnitudes to integers
    float size[4][2], unit[SETS];
    uint32_t weights[SETS][4];
    if (w.flags & MAGNITUDES) numbers(size, meta, g, w.flags & LOGARITHMS); else ones(size);
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      float e[4][2], most = 0.f, sum = l[s];
#pragma unroll
      for (int k = 0; k < 8; k++) { e[k / 2][k % 2] = exp2_fast(v[s][k / 2][k % 2] - m[s]); sum += e[k / 2][k % 2]; }
      if (__any_sync(~0u, sum > FAR)) {
        float peak = v[s][0][0];
#pragma unroll
        for (int k = 1; k < 8; k++) peak = fmaxf(peak, v[s][k / 2][k % 2]);
        peak = fmaxf(max_over_rows(peak), m[s]);
        const float shrink = exp2_fast(m[s] - peak);
        sum = l[s] * shrink;
        m[s] = peak; offset[s] *= shrink;
#pragma unroll
        for (int k = 0; k < TILES; k++) { o[s][k][0] *= shrink; o[s][k][1] *= shrink; }
#pragma unroll
        for (int k = 0; k < 8; k++) { e[k / 2][k % 2] = exp2_fast(v[s][k / 2][k % 2] - peak); sum += e[k / 2][k % 2]; }
      }
      l[s] = sum;
#pragma unroll
      for (int k = 0; k < 8; k++) { v[s][k / 2][k % 2] = e[k / 2][k % 2] * size[k / 2][k % 2]; most = fmaxf(most, v[s][k / 2][k % 2]); }
      // A power of two that takes the largest just below 2^16; the factor beside it leaves room for rounding.
      const int exponent = max(__float_as_int(max_over_rows(most)) >> 23, 40);
      const float up = __int_as_float((269 - exponent) << 23) * 0.9990234375f;
      unit[s] = __int_as_float((exponent - 15) << 23) * (1.f / 0.9990234375f);
#pragma unroll
      for (int k = 0; k < 4; k++)   // 2^23 added leaves the integer in the low bits; bytes {high, high, low, low} of two tokens
        weights[s][k] = transpose(permute(__float_as_int(fmaf(v[s][k][0], up, 8388608.f)), __float_as_int(fmaf(v[s][k][1], up, 8388608.f)), 0x4051));
    }

    // ---- values: a lane has head t of each set, channels 16 tile + 8 j + g
    const uint32_t book_at = books_at + TILES * BOOK;
    if (w.value_width == 4) values<4>(o, offset, codes, book_at, weights, unit, lane);
    else if (w.value_width == 3) values<3>(o, offset, codes, book_at, weights, unit, lane);
    else if (w.value_width == 2) values<2>(o, offset, codes, book_at, weights, unit, lane);
    else if (w.value_width == 8) values<8>(o, offset, codes, book_at, weights, unit, lane);
    else values<1>(o, offset, codes, book_at, weights, unit, lane);
    __syncwarp();
    if (lane == 0 && i + stages < count) fetch(i + stages, stage);
    if (++stage == stages) { stage = 0; phase ^= 1; }
  }

  // ---- the block: every warp's state goes to its own ring, rows of ROW floats, reference and sum behind the channels
  constexpr int ROW = HEAD_DIM + 8, QUADS = HEAD_DIM / 4;
  float* rows = reinterpret_cast<float*>(ring);
  const int ring_floats = p.ring_bytes / 4;
#pragma unroll
  for (int s = 0; s < SETS; s++) {
    const float sum = sum_over_rows(l[s]);
    float* row = rows + (s * 4 + t) * ROW;
#pragma unroll
    for (int k = 0; k < TILES; k++) { row[16 * k + g] = o[s][k][0] - offset[s]; row[16 * k + 8 + g] = o[s][k][1] - offset[s]; }
    if (g == 0) { row[HEAD_DIM] = m[s]; row[HEAD_DIM + 1] = sum; }
  }
  __syncthreads();
  const float* all = reinterpret_cast<const float*>(rings);
  for (int k = threadIdx.x; k < p.group * QUADS; k += THREADS) {
    const int h = k / QUADS, channel = (k - h * QUADS) * 4;
    float most = NOTHING, sum = 0.f;
    float4 mixed = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < WARPS; i++) most = fmaxf(most, all[i * ring_floats + h * ROW + HEAD_DIM]);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float* row = all + i * ring_floats + h * ROW;
      const float f = exp2_fast(row[HEAD_DIM] - most);
      const float4 y = *reinterpret_cast<const float4*>(row + channel);
      sum = fmaf(f, row[HEAD_DIM + 1], sum);
      mixed.x = fmaf(f, y.x, mixed.x); mixed.y = fmaf(f, y.y, mixed.y); mixed.z = fmaf(f, y.z, mixed.z); mixed.w = fmaf(f, y.w, mixed.w);
    }
    const size_t at = (size_t)(w.splits == 1 ? w.head : w.first_slot + w.index) * p.group + h;
    if (w.splits == 1) {
      const float inverse = inverse_of(sum);
      mixed.x *= inverse; mixed.y *= inverse; mixed.z *= inverse; mixed.w *= inverse;
      if (channel == 0) p.lse[at] = (most + log2_fast(sum)) * 0.6931471805599453f;
    } else if (channel == 0) p.partial_sums[at] = float2{most, sum};
    reinterpret_cast<float4*>(w.splits == 1 ? p.output : p.partial)[at * QUADS + channel / 4] = mixed;
  }
  const int splits = w.splits;
  if (splits == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(p.arrived + w.head) : "memory");
    sh.last = before == splits - 1;
    if (sh.last) p.arrived[w.head] = 0;
  }
  __syncthreads();
  if (!sh.last) return;

  // ---- the last block: merge the splits
  constexpr int CHUNK = 16;
  const size_t base = (size_t)w.first_slot * p.group;
  const float4* partial = reinterpret_cast<const float4*>(p.partial) + base * QUADS;
  const int stride = p.group * QUADS;
  float4 y[CHUNK];
  auto load = [&](int k, int from) {
#pragma unroll
    for (int j = 0; j < CHUNK; j++) y[j] = __ldcg(partial + (size_t)(from + j < splits ? from + j : 0) * stride + min(k, stride - 1));
  };
  load(threadIdx.x, 0);
  float* share = reinterpret_cast<float*>(rings);   // (group, MOST_SPLITS)
  for (int h = warp; h < p.group; h += WARPS) {
    float2 found[MOST_SPLITS / 32];
    float most = NOTHING, sum = 0.f;
#pragma unroll
    for (int j = 0; j < MOST_SPLITS / 32; j++) {
      found[j] = j * 32 + lane < splits ? __ldcg(p.partial_sums + base + (size_t)(j * 32 + lane) * p.group + h) : float2{NOTHING, 0.f};
      most = fmaxf(most, found[j].x);
    }
#pragma unroll
    for (int k = 1; k < 32; k *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, k));
#pragma unroll
    for (int j = 0; j < MOST_SPLITS / 32; j++) { found[j].x = exp2_fast(found[j].x - most); sum = fmaf(found[j].x, found[j].y, sum); }
#pragma unroll
    for (int k = 1; k < 32; k *= 2) sum += __shfl_xor_sync(~0u, sum, k);
    const float inverse = inverse_of(sum);
#pragma unroll
    for (int j = 0; j < MOST_SPLITS / 32; j++) share[h * MOST_SPLITS + j * 32 + lane] = j * 32 + lane < splits ? found[j].x * inverse : 0.f;
    if (lane == 0) p.lse[(size_t)w.head * p.group + h] = (most + log2_fast(sum)) * 0.6931471805599453f;
  }
  __syncthreads();
  for (int k = threadIdx.x; k < stride; k += THREADS) {
    const float* f = share + k / QUADS * MOST_SPLITS;
    float4 mixed = {0, 0, 0, 0};
    for (int from = 0; from < splits; from += CHUNK) {
      if (from || k >= THREADS) load(k, from);
#pragma unroll
      for (int j = 0; j < CHUNK; j++) {
        const float own = f[from + j];
        mixed.x = fmaf(own, y[j].x, mixed.x); mixed.y = fmaf(own, y[j].y, mixed.y); mixed.z = fmaf(own, y[j].z, mixed.z); mixed.w = fmaf(own, y[j].w, mixed.w);
      }
    }
    reinterpret_cast<float4*>(p.output)[(size_t)w.head * stride + k] = mixed;
  }
}

extern "C" int kvfold_records_shared(int ring_bytes) { return WARPS * ring_bytes + (int)sizeof(Shared); }

// `early`: what the launch ahead does not write (records, places, tables) may be read before it has ended.
template <typename... Given, typename... Args> int launched(void (*kernel)(Given...), dim3 blocks, int bytes, int early, void* stream, Args... args) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks; config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = bytes; config.stream = (cudaStream_t)stream;
  config.attrs = &attribute; config.numAttrs = early ? 1 : 0;
  return (int)cudaLaunchKernelEx(&config, kernel, args...);
}

extern "C" int kvfold_records(const Problem* p, int blocks, int early, void* stream) {
  const int bytes = kvfold_records_shared(p->ring_bytes);
  cudaError_t e = cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (e != cudaSuccess) return (int)e;
  return launched(attend, dim3(blocks), bytes, early, stream, *p);
}

#if BIAS > 1 && WARPS == 8
extern "C" int kvfold_turned_biases(const Problem* p, const int* positions, const int* runs, const int* begins, int row_heads, int turns_a_block, int early, void* stream) {
  return launched(turned_biases, dim3((p->turns + turns_a_block - 1) / turns_a_block, row_heads), 0, early, stream, *p, positions, runs, begins, turns_a_block);
}
#endif

extern "C" const char* kvfold_records_error(int code) { return cudaGetErrorString((cudaError_t)code); }
