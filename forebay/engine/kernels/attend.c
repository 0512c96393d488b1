/* Forebay's CPU kernels. Plain C, no Python and no torch headers; called through ctypes with raw pointers.
 *
 * One source for every instruction set: arithmetic is on vectors of 8 floats (GCC vector extensions), which the compiler
 * maps to what there is (one AVX2 register, two of SSE or NEON), and the workers are cloned for each level of x86-64; the
 * loader picks one at run time. (Vectors of 16 would be one register of AVX-512, but on AVX2 GCC keeps such sums in
 * memory: ten times slower.) Nothing here allocates, and no result depends on the number of threads or on which
 * other sequences are in the batch: every row is computed by itself, in one fixed order.
 */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONED
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

/* AHEAD: pages from the one in work to the one that is fetched; 1, 2 and 8 were slower, and so was fetching into L1. */
enum { PAGE = 16, AHEAD = 4, SPLIT = 256, MAX_ROWS = 64, MAX_DIM = 256, FLOAT32 = 0, BFLOAT16 = 1 };

/* ---- threads: torch's own OpenMP team, so that two pools never spin against each other. Without it, one thread. */

typedef void (*team_fn)(void (*)(void *), void *, unsigned, unsigned);
static team_fn team;
static unsigned team_size = 1;

/* `run_team` is GOMP_parallel of the OpenMP runtime that torch has loaded, or NULL. */
void forebay_init(team_fn run_team, unsigned threads) {
    team = run_team;
    team_size = run_team && threads > 1 ? threads : 1;
}

static void run(void (*work)(void *), void *job, int64_t units) {
    if (team_size > 1 && units > 1)
        team(work, job, team_size, 0);
    else
        work(job);
}

/* ---- vectors */

INLINE v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }

INLINE v8 load(const float *p) {
    v8 v;
    memcpy(&v, p, sizeof v);
    return v;
}

INLINE void store(float *p, v8 v) { memcpy(p, &v, sizeof v); }

INLINE v8 load_any(const void *base, int64_t at, int type) {
    if (type == FLOAT32) return load((const float *)base + at);
    h8 h;
    memcpy(&h, (const uint16_t *)base + at, sizeof h);
    return (v8)(__builtin_convertvector(h, u8) << 16);
}

INLINE uint16_t to_bf16(float x) { /* round to nearest even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

INLINE void store_any(void *base, int64_t at, float x, int type) {
    if (type == FLOAT32)
        ((float *)base)[at] = x;
    else
        ((uint16_t *)base)[at] = to_bf16(x);
}

INLINE float load_one(const void *base, int64_t at, int type) {
    if (type == FLOAT32) return ((const float *)base)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)base)[at] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
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

INLINE v8 max8(v8 a, v8 b) {
    i8 more = b > a;
    return (v8)(((i8)b & more) | ((i8)a & ~more));
}

INLINE float sum8(v8 v) { /* in a fixed order */
    float s = 0;
    for (int i = 0; i < 8; i++) s += v[i];
    return s;
}

/* ---- paged attention */

typedef struct {
    const void *q; /* [rows, heads, dim], q_stride elements from row to row, of `type` like the pool and out */
    void *out;     /* [rows, heads * dim] */
    void *pool;    /* [page][layer][K|V][kv head]: K as [dim][16 tokens], V as [16 tokens][dim] */
    const int64_t *tables, *positions;
    const int64_t *units; /* [n_units][3]: sequence, first row, rows */
    int64_t n_units, table_width, q_stride;
    int32_t layer, n_layers, heads, kv_heads, dim, type;
    float scale;
    atomic_llong next;
} attend_job;

INLINE int64_t block_of(const attend_job *j, int64_t page, int kv, int head) {
    return (((page * j->n_layers + j->layer) * 2 + kv) * j->kv_heads + head) * PAGE * j->dim;
}

/* Up to four rows at once, each with two sums in registers: what a row adds, as long as R says that it is there. */
#define EACH_ROW(what) what(0) what(1) what(2) what(3)
#define SUMS(r) v8 low##r = {0}, high##r = {0};
#define ADD(r) \
    if (R > r) { \
        v8 x = splat(factors[r * stride]); \
        low##r += x * low, high##r += x * high; \
    }
#define LOAD(r) \
    if (R > r) low##r = load(to + r * to_stride), high##r = load(to + r * to_stride + 8);
#define STORE(r) \
    if (R > r) store(to + r * to_stride, low##r), store(to + r * to_stride + 8, high##r);

/* Scores of R rows against the 16 tokens of one page of K. */
INLINE void dot_page(const int R, const float *q, const void *pool, int64_t k, float *to, int dim, int type) {
    enum { stride = MAX_DIM, to_stride = SPLIT };
    EACH_ROW(SUMS)
    for (int d = 0; d < dim; d++) {
        const float *factors = q + d;
        v8 low = load_any(pool, k + d * PAGE, type), high = load_any(pool, k + d * PAGE + 8, type);
        EACH_ROW(ADD)
    }
    EACH_ROW(STORE)
}

/* 16 dims of R rows: add the values of up to 16 tokens of one page of V, weighed by their scores. */
INLINE void weigh_page(const int R, const float *scores, const void *pool, int64_t v, int tokens, float *to, int dim,
                       int type) {
    enum { stride = SPLIT, to_stride = MAX_DIM };
    EACH_ROW(SUMS)
    EACH_ROW(LOAD)
    for (int t = 0; t < tokens; t++, v += dim) {
        const float *factors = scores + t;
        v8 low = load_any(pool, v, type), high = load_any(pool, v + 8, type);
        EACH_ROW(ADD)
    }
    EACH_ROW(STORE)
}

/* A block of a page lies anywhere in memory, where no hardware prefetcher follows: ask for a later one in time. */
INLINE void fetch_ahead(const attend_job *j, const int64_t *table, int64_t at, int64_t length, int kv, int head, int type) {
    if (at + AHEAD * PAGE >= length) return;
    const int size = type == FLOAT32 ? 4 : 2;
    const char *block = (const char *)j->pool + block_of(j, table[at / PAGE + AHEAD], kv, head) * size;
    for (int i = 0; i < PAGE * j->dim * size; i += 64) __builtin_prefetch(block + i, 0, 2);
}

#define BY_FOUR(count, r, call) \
    for (int r = 0; r < (count); r += 4) switch ((count) - r) { \
        case 1: { enum { R = 1 }; call; } break; \
        case 2: { enum { R = 2 }; call; } break; \
        case 3: { enum { R = 3 }; call; } break; \
        default: { enum { R = 4 }; call; } }

/* Tokens in fixed splits of 256 from position 0: a softmax within each, merged in order. So a row's result does not
 * depend on where a chunk begins or on what else is computed with it. */
INLINE void attend_unit(attend_job *j, int64_t unit, int head, const int type) {
    float q[MAX_ROWS * MAX_DIM], scores[MAX_ROWS * SPLIT], part[MAX_ROWS * MAX_DIM], total[MAX_ROWS * MAX_DIM];
    float top[MAX_ROWS], weight[MAX_ROWS];
    const int64_t *u = j->units + unit * 3, *table = j->tables + u[0] * j->table_width;
    const int group = j->heads / j->kv_heads, rows = (int)u[2] * group, dim = j->dim;
    for (int r = 0; r < rows; r++) {
        int64_t from = (u[1] + r / group) * j->q_stride + (int64_t)(head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) q[r * MAX_DIM + d] = load_one(j->q, from + d, type) * j->scale;
        top[r] = -__builtin_inff();
        weight[r] = 0;
        memset(total + r * MAX_DIM, 0, sizeof(float) * dim);
    }
    const int64_t length = j->positions[u[1] + u[2] - 1] + 1;
    for (int64_t first = 0; first < length; first += SPLIT) {
        const int n = length - first < SPLIT ? (int)(length - first) : SPLIT;
        for (int t = 0; t < n; t += PAGE) {
            int64_t k = block_of(j, table[(first + t) / PAGE], 0, head);
            fetch_ahead(j, table, first + t, length, 0, head, type);
            BY_FOUR(rows, r, dot_page(R, q + r * MAX_DIM, j->pool, k, scores + r * SPLIT + t, dim, type))
        }
        const int padded = (n + PAGE - 1) / PAGE * PAGE;
        float best[MAX_ROWS], sum[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            float *s = scores + r * SPLIT;
            int64_t seen = j->positions[u[1] + r / group] + 1 - first;
            for (int t = seen < 0 ? 0 : (int)(seen < padded ? seen : padded); t < padded; t++) s[t] = -__builtin_inff();
            v8 high = load(s);
            for (int t = 8; t < padded; t += 8) high = max8(high, load(s + t));
            best[r] = high[0];
            for (int i = 1; i < 8; i++) best[r] = high[i] > best[r] ? high[i] : best[r];
            sum[r] = 0;
            if (best[r] == -__builtin_inff()) { /* nothing of this split is visible to the row */
                memset(s, 0, sizeof(float) * padded);
                continue;
            }
            v8 lanes = splat(0);
            for (int t = 0; t < padded; t += 8) {
                v8 p = exp_negative(load(s + t) - best[r]);
                store(s + t, p);
                lanes += p;
            }
            sum[r] = sum8(lanes);
        }
        for (int r = 0; r < rows; r++) memset(part + r * MAX_DIM, 0, sizeof(float) * dim);
        for (int t = 0; t < n; t += PAGE) {
            int64_t v = block_of(j, table[(first + t) / PAGE], 1, head);
            fetch_ahead(j, table, first + t, length, 1, head, type);
            const int tokens = n - t < PAGE ? n - t : PAGE; /* what is not written yet may be anything, NaN too */
            for (int d = 0; d < dim; d += 16)
                BY_FOUR(rows, r, weigh_page(R, scores + r * SPLIT + t, j->pool, v + d, tokens, part + r * MAX_DIM + d,
                                            dim, type))
        }
        for (int r = 0; r < rows; r++) {
            if (sum[r] == 0) continue;
            float high = best[r] > top[r] ? best[r] : top[r];
            float old = exp_one(top[r] - high), new = exp_one(best[r] - high);
            weight[r] = weight[r] * old + sum[r] * new;
            for (int d = 0; d < dim; d++)
                total[r * MAX_DIM + d] = total[r * MAX_DIM + d] * old + part[r * MAX_DIM + d] * new;
            top[r] = high;
        }
    }
    for (int r = 0; r < rows; r++) {
        int64_t to = ((u[1] + r / group) * j->heads + head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) store_any(j->out, to + d, total[r * MAX_DIM + d] / weight[r], type);
    }
}

CLONED static void attend_work(void *arg) {
    attend_job *j = arg;
    const int64_t all = j->n_units * j->kv_heads;
    int64_t at;
    while ((at = atomic_fetch_add(&j->next, 1)) < all) {
        if (j->type == FLOAT32)
            attend_unit(j, at / j->kv_heads, (int)(at % j->kv_heads), FLOAT32);
        else
            attend_unit(j, at / j->kv_heads, (int)(at % j->kv_heads), BFLOAT16);
    }
}

void forebay_attend(attend_job *j) {
    atomic_store(&j->next, 0);
    run(attend_work, j, j->n_units * j->kv_heads);
}

/* ---- writing K and V: kv [rows, 2 * kv heads, dim], kv_stride elements from row to row, into (page, offset) */

typedef struct {
    const void *kv;
    void *pool;
    const int64_t *page, *offset;
    int64_t rows, kv_stride;
    int32_t layer, n_layers, kv_heads, dim, type;
} write_job;

void forebay_write(const write_job *w) {
    const int size = w->type == FLOAT32 ? 4 : 2;
    for (int64_t row = 0; row < w->rows; row++) {
        const char *from = (const char *)w->kv + row * w->kv_stride * size;
        char *to = (char *)w->pool + (w->page[row] * w->n_layers + w->layer) * 2 * w->kv_heads * PAGE * w->dim * size;
        for (int head = 0; head < w->kv_heads; head++, from += w->dim * size, to += PAGE * w->dim * size)
            for (int d = 0; d < w->dim; d++)
                memcpy(to + (d * PAGE + w->offset[row]) * size, from + d * size, size);
        for (int head = 0; head < w->kv_heads; head++, from += w->dim * size, to += PAGE * w->dim * size)
            memcpy(to + w->offset[row] * w->dim * size, from, w->dim * size);
    }
}
