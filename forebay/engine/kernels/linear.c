/* Linear layers on 8-bit activations: y = x W^T, weights in 4 or 8 bits.
 *
 * A block of packed weights is 16 channels; inside it every 32 inputs are a group: 16 float16 scales d, 16 float16 m, then
 *   4 bits: 4 pairs of quads [2][8 channels][4 inputs], the first quad of a pair in the low half of the byte, the second
 *           in the high half;                    w = d * code + m
 *   8 bits: 8 quads [2][8 channels][4 inputs];   w = d * spread(code) / SPREAD + m
 * Activations are spread: a Hadamard transform of the values at one place of the 8 quads, the same in each factor, which
 * leaves their product as it is (times 8). Weights in 8 bits are stored so; those in 4 bits are spread as they are read,
 * which is exact and adds whole registers: eight codes of 0..15 become one of 0..120 and seven of -60..60.
 *
 * Products are summed as integers inside a group (exact), groups are added as floats in their order. So the result of a
 * row does not depend on how many rows are computed with it, nor by which thread.
 *
 * The multiplication wants one factor unsigned. 4-bit codes, spread, get 64 more where they can be negative; what that
 * adds is taken off at the start. They then fit in 7 bits, so that AVX2 can add pairs of products in 16. The sign of an
 * 8-bit code moves to the activation instead.
 */
#include "common.h"

/* Bytes of one group: scales and m, then codes; with them expanded to bytes. */
enum { HEAD = 64, EXPANDED = HEAD + GROUP * LANES };
INLINE int64_t group_bytes(int bits) { return HEAD + GROUP * LANES * bits / 8; }

int64_t forebay_block_bytes(int bits, int64_t k) { return k / GROUP * group_bytes(bits); }

/* ---- portable */

INLINE int code_of(const uint8_t *w, int bits, int lane, int i) {
    const int quad = i / 4, at = lane / 8 * 32 + lane % 8 * 4 + i % 4;
    if (bits == 8) return (int8_t)w[HEAD + quad * 64 + at];
    return w[HEAD + quad / 2 * 64 + at] >> (quad % 2 * 4) & 15;
}

/* Codes of one channel and group, spread. */
static void spread_codes(const uint8_t *w, int bits, int lane, int *to) {
    for (int i = 0; i < GROUP; i++) to[i] = code_of(w, bits, lane, i);
    for (int half = 4; bits == 4 && half < GROUP; half *= 2)
        for (int i = 0; i < GROUP; i++)
            if (!(i & half)) {
                const int a = to[i], b = to[i + half];
                to[i] = a + b, to[i + half] = a - b;
            }
}

static void half_row(const uint8_t *w, int lane, float *x) {
    uint16_t h;
    memcpy(&h, w + lane * 2, sizeof h);
    *x = from_half(h);
}

/* One channel of a block as floats: for the embedding, whose rows are the LM head's. */
void forebay_unpack_row(const uint8_t *w, int bits, int64_t k, int64_t lane, float *y) {
    for (int64_t g = 0; g < k / GROUP; g++, w += group_bytes(bits), y += GROUP) {
        float d, m;
        half_row(w, (int)lane, &d);
        half_row(w + 32, (int)lane, &m);
        v8 codes[4];
        for (int i = 0; i < GROUP; i++) codes[i / 8][i % 8] = (float)code_of(w, bits, (int)lane, i);
        if (bits == 8) spread_group(codes);
        const float by = bits == 8 ? d / SPREAD : d;
        for (int i = 0; i < GROUP; i++) y[i] = by * codes[i / 8][i % 8] + m;
    }
}

static void portable_block(const uint8_t *w, int bits, acts x, int64_t k, int64_t rows, float *y, int64_t y_width,
                           int add) {
    const int64_t groups = k / GROUP;
    for (int64_t r = 0; r < rows; r++)
        for (int lane = 0; lane < LANES; lane++) {
            const uint8_t *at = w;
            float sum = 0;
            for (int64_t g = 0; g < groups; g++, at += group_bytes(bits)) {
                const int8_t *q = x.q + r * k + g * GROUP;
                int32_t dot = 0;
                int codes[GROUP];
                float d, m;
                spread_codes(at, bits, lane, codes);
                for (int i = 0; i < GROUP; i++) dot += codes[i] * q[i];
                half_row(at, lane, &d);
                half_row(at + 32, lane, &m);
                sum = m * x.sum[r * groups + g] + sum;
                sum = (float)dot * (d * x.scale[r * groups + g]) + sum;
            }
            y[r * y_width + lane] = add ? y[r * y_width + lane] + sum : sum;
        }
}

/* ---- x86 */

#if X86
#include <immintrin.h>
/* The compiler would first multiply everything and then add, with all products in memory: keep sums where they are. */
#define PIN(v) __asm__("" : "+x"(v))
#define AT(p) _mm256_loadu_si256((const __m256i *)(p))
#define HALVES(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define ROWS _Pragma("GCC unroll 4") for (int r = 0; r < R; r++)

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
INLINE __m256i four(const int8_t *p) {
    int32_t v;
    memcpy(&v, p, sizeof v);
    return _mm256_set1_epi32(v);
}
#define VNNI 0
#define NAME(x) x##_avx2
#include "tile.h"
#undef VNNI
#undef NAME
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")
#define VNNI 1
#define NAME(x) x##_vnni
#include "tile.h"
#pragma GCC pop_options
#endif

typedef void (*block_fn)(const uint8_t *, int, acts, int64_t, int64_t, float *, int64_t, int);

static block_fn block_of_level(int level) {
#if X86
    if (level == 1) return block_avx2;
    if (level == 2) return block_vnni;
#endif
    return portable_block;
}

/* Whether a level computes what the portable code does, on made-up codes: it may never have run on such a CPU. */
static int agrees(int level) {
    enum { ROWS_HERE = 7, K = 2 * GROUP };
    uint8_t w[2 * 576];
    int8_t q[ROWS_HERE * K];
    int32_t zero[ROWS_HERE * 2];
    float scale[ROWS_HERE * 2], sum[ROWS_HERE * 2], ours[ROWS_HERE * LANES], theirs[ROWS_HERE * LANES];
    uint32_t seed = 1;
    for (int bits = 4; bits <= 8; bits += 4) {
        const int size = (int)group_bytes(bits);
        for (int i = 0; i < 2 * size; i++) w[i] = (uint8_t)((seed = seed * 1664525u + 1013904223u) >> 24);
        for (int i = 0; i < 2 * size; i++)
            if (i % size < HEAD && i % 2) w[i] = 0x2c | (w[i] & 0x83); /* float16 near 1/16 */
        for (int i = 0; i < ROWS_HERE * K; i++)
            q[i] = (int8_t)((int32_t)((seed = seed * 1664525u + 1013904223u) >> 8) % 255 - 127);
        for (int i = 0; i < ROWS_HERE * 2; i++) scale[i] = 0.01f * (float)(i + 1), sum[i] = 0.3f * (float)(i - 5);
        for (int i = 0; i < ROWS_HERE * 2; i++) zero[i] = 0;
        for (int i = 0; i < ROWS_HERE * K; i++) zero[i / GROUP] -= i % GROUP < 4 ? 0 : ZERO * q[i];
        acts x = {q, scale, sum, zero};
        block_of_level(level)(w, bits, x, K, ROWS_HERE, ours, LANES, 0);
        portable_block(w, bits, x, K, ROWS_HERE, theirs, LANES, 0);
        for (int i = 0; i < ROWS_HERE * LANES; i++)
            if (!(fabsf(ours[i] - theirs[i]) <= 1e-4f * (1 + fabsf(theirs[i])))) return 0;
    }
    return 1;
}

static int level = 0;
static block_fn block = portable_block;

int forebay_has(void) { return level; }

/* Use what this CPU has and computes right, but nothing above `limit` (tests of the lower ones): 0 portable, 1 AVX2,
 * 2 VNNI. */
int forebay_level(int limit) {
    int has = 0;
#if X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
        has = 1;
        if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512bw"))
            has = 2;
    }
#endif
    has = has < limit ? has : limit;
    while (has > 0 && !agrees(has)) has--;
    level = has;
    block = block_of_level(has);
    return has;
}

/* 16 channels of y for `rows` rows; `add`: to what is there. `y` points to the block's first channel. */
void forebay_linear_block(const uint8_t *w, int bits, acts x, int64_t k, int64_t rows, float *y, int64_t y_width,
                          int add) {
    block(w, bits, x, k, rows, y, y_width, add);
}
