/* What the kernels share: vectors, bits, and the team of threads. */
#ifndef FOREBAY_COMMON_H
#define FOREBAY_COMMON_H

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

/* Plain C is cloned for each level of x86-64; the loader picks one at run time. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86 1
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define X86 0
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));
typedef int8_t b8 __attribute__((vector_size(8)));

/* PAGE: tokens of a KV page. GROUP: values that share a scale, in weights and activations, spread in blocks of SPREAD:
 * each fourth value of the group. ZERO: what unsigned codes have more. LANES: channels of a block of packed weights. */
enum { PAGE = 16, GROUP = 32, SPREAD = 8, ZERO = 64, LANES = 16, MAX_DIM = 256 };
/* Types of K and V in the pool, and of what goes in and out. INT8 has one float scale per token and head. */
enum { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE v8 splat(float x) { return x - (v8){0}; } /* (spelled {x, x, ...}, the compiler moves them one by one) */

INLINE v8 load(const float *p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, v8 v) { memcpy(p, &v, sizeof v); }

INLINE v8 max8(v8 a, v8 b) {
    i8 more = b > a;
    return (v8)(((i8)b & more) | ((i8)a & ~more));
}

INLINE v8 abs8(v8 a) { return (v8)((i8)a & 0x7fffffff); }

INLINE float sum8(v8 v) { /* in a fixed order */
    float s = 0;
    for (int i = 0; i < 8; i++) s += v[i];
    return s;
}

#ifdef __clang__
#define SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define SHUFFLE(v, ...) __builtin_shuffle(v, (i8){__VA_ARGS__})
#endif

/* Hadamard transform of n values in place, in blocks of `block` (a power of two from 8 on), not scaled: it spreads the
 * few large ones over all that share a scale with them. Order and rounding as hadamard.py. */
INLINE void spread(float *x, int n, int block) {
    const v8 one = {1, -1, 1, -1, 1, -1, 1, -1}, two = {1, 1, -1, -1, 1, 1, -1, -1}, four = {1, 1, 1, 1, -1, -1, -1, -1};
    for (int i = 0; i < n; i += 8) {
        v8 v = load(x + i);
        v = SHUFFLE(v, 1, 0, 3, 2, 5, 4, 7, 6) + v * one;
        v = SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5) + v * two;
        store(x + i, SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3) + v * four);
    }
    for (int half = 8; half < block; half *= 2)
        for (int i = 0; i < n; i += 2 * half)
            for (int k = i; k < i + half; k += 8) {
                v8 a = load(x + k), b = load(x + k + half);
                store(x + k, a + b);
                store(x + k + half, a - b);
            }
}

/* The same of a group of 32, each fourth value a block: whole registers are added, in weights too (linear.c). */
INLINE void spread_group(v8 v[4]) {
    const v8 four = {1, 1, 1, 1, -1, -1, -1, -1};
    for (int i = 0; i < 4; i++) v[i] = SHUFFLE(v[i], 4, 5, 6, 7, 0, 1, 2, 3) + v[i] * four;
    for (int half = 1; half < 4; half *= 2)
        for (int i = 0; i < 4; i++)
            if (!(i & half)) {
                v8 a = v[i], b = v[i + half];
                v[i] = a + b;
                v[i + half] = a - b;
            }
}

INLINE int32_t added8(i8 v) {
    v += SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3);
    v += SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[1];
}

INLINE int32_t highest8(i8 v) {
    i8 other = SHUFFLE(v, 4, 5, 6, 7, 0, 1, 2, 3), more = other > v;
    v = (other & more) | (v & ~more);
    other = SHUFFLE(v, 2, 3, 0, 1, 6, 7, 4, 5), more = other > v;
    v = (other & more) | (v & ~more);
    return v[0] > v[1] ? v[0] : v[1];
}

INLINE float top8(v8 v) {
    float best = v[0];
    for (int i = 1; i < 8; i++) best = v[i] > best ? v[i] : best;
    return best;
}

INLINE v8 round_product(v8 x, float by) { /* x * by to the nearest integer, ties to even; for less than 2^22 */
    const v8 magic = splat(12582912.0f); /* 1.5 * 2^23 */
    v8 product = x * by;
    __asm__("" : "+m"(product)); /* rounded once by itself, as torch does: fused with the sum, ties would fall elsewhere */
    return (product + magic) - magic;
}

/* exp(x) for x <= 0, 0 below -87. 2^k * 2^f with f in [-1/2, 1/2] by a polynomial of degree 6 (Taylor of 2^f: relative
 * error under 2e-7). */
INLINE v8 exp_negative(v8 x) {
    const v8 log2e = splat(1.44269504088896341f), magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds */
    i8 dead = x < splat(-87.0f);
    v8 t = x * log2e;
    v8 k = (t + magic) - magic;
    v8 f = (x - k * splat(0.693359375f)) + k * splat(2.12194440e-4f); /* x - k ln 2, in two parts */
    v8 p = splat(1.f / 720);
    p = p * f + splat(1.f / 120);
    p = p * f + splat(1.f / 24);
    p = p * f + splat(1.f / 6);
    p = p * f + splat(.5f);
    p = p * f + splat(1.f);
    p = p * f + splat(1.f);
    i8 power = (__builtin_convertvector(k, i8) + 127) << 23;
    return (v8)((i8)(p * (v8)power) & ~dead);
}

INLINE float exp_one(float x) { return exp_negative(splat(x))[0]; }

INLINE uint16_t to_bf16(float x) { /* round to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE float from_half(uint16_t h) { /* float16, subnormals too */
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff, bits = rest << 13;
    float f;
    if (rest >= 0x7c00) { /* infinity or NaN */
        bits = sign | bits | 0x7f800000u;
    } else { /* scaling by 2^112 mends the exponent, of subnormals as well */
        memcpy(&f, &bits, sizeof f);
        f *= 5.192296858534828e33f;
        memcpy(&bits, &f, sizeof bits);
        bits |= sign;
    }
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE void store_any(void *base, int64_t at, float x, int type) {
    if (type == FLOAT32)
        ((float *)base)[at] = x;
    else
        ((uint16_t *)base)[at] = to_bf16(x);
}

INLINE float load_one(const void *base, int64_t at, int type) {
    return type == FLOAT32 ? ((const float *)base)[at] : from_bf16(((const uint16_t *)base)[at]);
}

/* Bytes of one head's K or V in one page: 16 tokens, and the scales behind them where there are any. */
INLINE int64_t block_bytes(int dim, int type) {
    return type == INT8 ? PAGE * dim + PAGE * (int64_t)sizeof(float) : PAGE * dim * (type == FLOAT32 ? 4 : 2);
}

/* ---- jobs. Field by field the structures of __init__.py. */

typedef struct {
    const void *q; /* [rows, heads, dim], q_stride elements from row to row, of type `io` like out */
    void *out;     /* [rows, heads * dim] */
    void *pool;    /* [page][layer][K|V][kv head]: K as [dim][16 tokens], V as [16 tokens][dim] */
    const int64_t *tables, *positions;
    const int64_t *units; /* [n_units][5]: sequence, first row, rows, split or -1 for all of them, slot of the part */
    const int64_t *merges; /* [n_merges][3]: row, slot of its first part, parts */
    const int64_t *windows; /* [n_layers]: so many tokens back a row sees, itself included; 0: all */
    float *parts;          /* [slots][heads][dim + 2]: weighted values, largest score, sum of weights */
    int64_t n_units, n_merges, table_width, q_stride;
    int32_t layer, n_layers, heads, kv_heads, dim, type, io;
    float scale;
    atomic_llong next;
} attend_job;

typedef struct {
    const void *kv; /* [rows, 2 * kv heads, dim], kv_stride elements from row to row, of type `io` */
    void *pool;
    const int64_t *page, *offset;
    int64_t rows, kv_stride;
    int32_t layer, n_layers, kv_heads, dim, type, io;
} write_job;

/* Rows of activations in 8 bits: groups of 32 values share `scale`; `sum` is the sum of the group's values before they
 * were spread, `zero` what takes off what the ZERO in unsigned codes adds to the group's sum of products. */
typedef struct {
    int8_t *q;     /* [rows, k] */
    float *scale;  /* [rows, k / 32] */
    float *sum;    /* [rows, k / 32] */
    int32_t *zero; /* [rows, k / 32] */
} acts;

void forebay_attend_unit(const attend_job *j, int32_t layer, int64_t unit);
void forebay_merge_unit(const attend_job *j, int64_t unit);
void forebay_write_rows(const write_job *w, int64_t from, int64_t to);
void forebay_linear_block(const uint8_t *w, int bits, acts x, int64_t k, int64_t rows, float *y, int64_t y_width, int add);
void forebay_unpack_row(const uint8_t *w, int bits, int64_t k, int64_t row, float *y);
int64_t forebay_block_bytes(int bits, int64_t k);
int forebay_has(void); /* the instruction set in use: 0 portable, 1 AVX2, 2 VNNI */
typedef void (*team_fn)(void (*)(void *), void *, unsigned, unsigned);
void forebay_team(void (*work)(void *), void *job, int64_t units);

#endif
