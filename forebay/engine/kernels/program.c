/* A whole step in one call: the decoder as a list of operations, run by every thread of one team.
 *
 * Each operation is cut into units that threads take from a counter; the next one begins when all its units are done.
 * A thread that the system has put aside holds up the others only if it holds a unit, and no barrier counts heads: the
 * team may be of any size. Nothing allocates.
 */
#include "common.h"
#if X86
#include <immintrin.h>
#endif
#include <sched.h>

/* ---- threads: torch's own OpenMP team, so that two pools never spin against each other. Without it, one thread. */

static team_fn team;
static unsigned team_size = 1;
int forebay_level(int limit);

/* `run_team` is GOMP_parallel of the OpenMP runtime that torch has loaded, or NULL. */
void forebay_init(team_fn run_team, unsigned threads) {
    team = run_team;
    team_size = run_team && threads > 1 ? threads : 1;
}

void forebay_team(void (*work)(void *), void *job, int64_t units) {
    if (team_size > 1 && units > 1)
        team(work, job, team_size, 0);
    else
        work(job);
}

/* ---- rows */

/* One row of n values to 8 bits, in groups of 32; what is missing to k is 0. A group that holds what is not finite gets
 * a scale that is not finite, so that it is not lost. */
CLONED void forebay_quantize_row(const float *x, int64_t n, acts to, int64_t row, int64_t k) {
    for (int64_t g = 0; g < k / GROUP; g++) {
        float values[GROUP];
        v8 top = splat(0), odd = splat(0);
        int64_t there = n - g * GROUP;
        if (there < GROUP) memset(values, 0, sizeof values);
        memcpy(values, x + g * GROUP, sizeof(float) * (size_t)(there < 0 ? 0 : there < GROUP ? there : GROUP));
        for (int i = 0; i < GROUP; i += 8) {
            v8 v = load(values + i);
            top = max8(top, abs8(v));
            odd += v * 0; /* NaN where v is NaN or infinite */
        }
        const float high = top8(top), by = high > 0 ? 127 / high : 0;
        const float scale = high / 127 + sum8(odd);
        int8_t *q = to.q + row * k + g * GROUP;
        i8 total = {0};
        for (int i = 0; i < GROUP; i += 8) {
            i8 codes = __builtin_convertvector(round8(load(values + i) * by), i8);
            total += codes;
            b8 narrow = __builtin_convertvector(codes, b8);
            memcpy(q + i, &narrow, sizeof narrow);
        }
        int32_t all = 0;
        for (int i = 0; i < 8; i++) all += total[i];
        to.scale[row * (k / GROUP) + g] = scale;
        to.sum[row * (k / GROUP) + g] = scale * (float)all;
    }
}

/* Llama's RMS norm: x / sqrt(mean(x^2) + eps) * weight. n is a multiple of 8. */
CLONED static void norm_row(const float *x, const float *weight, float *y, int64_t n, float eps) {
    v8 squares = splat(0);
    for (int64_t i = 0; i < n; i += 8) squares += load(x + i) * load(x + i);
    const float by = 1 / sqrtf(sum8(squares) / (float)n + eps);
    for (int64_t i = 0; i < n; i += 8) store(y + i, load(x + i) * by * load(weight + i));
}

/* silu(gate) * up. */
CLONED static void silu_row(const float *gate, const float *up, float *y, int64_t n) {
    for (int64_t i = 0; i < n; i += 8) {
        v8 g = load(gate + i), e = exp_negative(-abs8(g)), one = splat(1);
        i8 minus = g < splat(0);
        v8 top = (v8)(((i8)e & minus) | ((i8)one & ~minus)); /* 1 / (1 + e^-g), without overflow on either side */
        store(y + i, g * (top / (one + e)) * load(up + i));
    }
}

/* Rotary embedding in place of `heads` heads, pairs (i, i + dim / 2); cos and sin [dim / 2]. */
CLONED static void rope_row(float *x, int64_t heads, int64_t dim, const float *cos, const float *sin) {
    const int64_t half = dim / 2;
    for (; heads > 0; heads--, x += dim)
        for (int64_t i = 0; i < half; i += 8) {
            v8 a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
            store(x + i, a * c - b * s);
            store(x + half + i, b * c + a * s);
        }
}

/* The index of the largest of n values (the first of equals), or -1 where it is not finite or one of them is NaN. */
CLONED static int64_t best_of(const float *x, int64_t n) {
    v8 top = splat(-__builtin_inff()), odd = splat(0);
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 v = load(x + i);
        top = max8(top, v);
        i8 nan = v != v;
        odd = (v8)((i8)odd | nan);
    }
    float high = top8(top);
    i8 bits = (i8)odd;
    for (int b = 0; b < 8; b++)
        if (bits[b]) return -1;
    for (; i < n; i++) {
        if (x[i] != x[i]) return -1;
        high = x[i] > high ? x[i] : high;
    }
    if (!(high < __builtin_inff() && high > -__builtin_inff())) return -1;
    for (i = 0; i < n; i++)
        if (x[i] == high) return i;
    return -1;
}

/* ---- operations. Field by field the structures of __init__.py. */

enum { EMBED, NORM, QUANTIZE, SILU, LINEAR, ROPE, ATTEND, MERGE, BEST };
enum { MAX_WIDTH = 1 << 16, LINEAR_ROWS = 64, MAX_OPS = 1 << 12 };

typedef struct {
    int32_t kind, layer;
    int32_t bits, add;    /* linear, embed: 4 or 8; linear: add to what is in `out` */
    int32_t sampled;      /* the rows are those that sample: norm gathers them */
    int32_t reserved;
    int64_t n, k;         /* linear: outputs and padded inputs. norm, quantize, silu: values and what they are padded to */
    const void *weight;
    const float *in;
    float *out;
    int64_t in_width, out_width; /* from row to row */
    float eps;
} op;

typedef struct {
    const op *ops;
    atomic_llong *next, *done; /* [n_ops] */
    attend_job *attend;
    write_job *write;
    acts x;
    const int64_t *ids, *positions, *sample_rows;
    int64_t *best; /* [n_samples] */
    const float *cos, *sin; /* [positions, dim / 2] */
    int64_t n_ops, rows, n_samples, vocab;
} program;

INLINE int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

/* How many blocks of 16 channels one unit of a linear takes: few rows, little work each. */
INLINE int64_t span_of(int64_t rows) { return rows < 4 ? 8 : rows < 16 ? 4 : 2; }

static int64_t units_of(const program *p, const op *o) {
    const int64_t rows = o->sampled ? p->n_samples : p->rows;
    switch (o->kind) {
        case LINEAR:
            return parts_of(o->n, LANES * span_of(rows)) * parts_of(rows, LINEAR_ROWS);
        case ATTEND:
            return p->attend->n_units * p->attend->kv_heads;
        case MERGE:
            return p->attend->n_merges * p->attend->heads;
        default:
            return rows;
    }
}

static void linear_unit(const program *p, const op *o, int64_t unit) {
    const int64_t rows = o->sampled ? p->n_samples : p->rows, span = span_of(rows);
    const int64_t tiles = parts_of(rows, LINEAR_ROWS), first = unit % tiles * LINEAR_ROWS;
    const int64_t count = least(LINEAR_ROWS, rows - first), size = forebay_block_bytes(o->bits, o->k);
    acts x = {p->x.q + first * o->k, p->x.scale + first * (o->k / GROUP), p->x.sum + first * (o->k / GROUP)};
    const int64_t from = unit / tiles * span, to = least(from + span, parts_of(o->n, LANES));
    for (int64_t block = from; block < to; block++)
        forebay_linear_block((const uint8_t *)o->weight + block * size, o->bits, x, o->k, count,
                             o->out + first * o->out_width + block * LANES, o->out_width, o->add);
}

static void run_unit(program *p, const op *o, int64_t row) {
    float scratch[MAX_WIDTH];
    switch (o->kind) {
        case EMBED: {
            const int64_t id = p->ids[row], size = forebay_block_bytes(o->bits, o->k);
            forebay_unpack_row((const uint8_t *)o->weight + id / LANES * size, o->bits, o->k, id % LANES, scratch);
            memcpy(o->out + row * o->out_width, scratch, sizeof(float) * (size_t)o->n);
            break;
        }
        case NORM:
            norm_row(o->in + (o->sampled ? p->sample_rows[row] : row) * o->in_width, o->weight, scratch, o->n, o->eps);
            forebay_quantize_row(scratch, o->n, p->x, row, o->k);
            break;
        case QUANTIZE:
            forebay_quantize_row(o->in + row * o->in_width, o->n, p->x, row, o->k);
            break;
        case SILU:
            silu_row(o->in + row * o->in_width, o->in + row * o->in_width + o->n, scratch, o->n);
            forebay_quantize_row(scratch, o->n, p->x, row, o->k);
            break;
        case LINEAR:
            linear_unit(p, o, row);
            break;
        case ROPE: {
            const int64_t half = p->attend->dim / 2, at = p->positions[row] * half;
            rope_row(o->out + row * o->out_width, p->attend->heads + p->attend->kv_heads, p->attend->dim, p->cos + at,
                     p->sin + at);
            write_job w = *p->write;
            w.layer = o->layer;
            forebay_write_rows(&w, row, row + 1);
            break;
        }
        case ATTEND:
            forebay_attend_unit(p->attend, o->layer, row);
            break;
        case MERGE:
            forebay_merge_unit(p->attend, row);
            break;
        case BEST:
            p->best[row] = best_of(o->in + row * o->in_width, p->vocab);
            break;
    }
}

static void run_program(void *arg) {
    program *p = arg;
    for (int64_t i = 0; i < p->n_ops; i++) {
        const op *o = p->ops + i;
        const int64_t units = units_of(p, o);
        int64_t at, mine = 0;
        while ((at = atomic_fetch_add_explicit(p->next + i, 1, memory_order_relaxed)) < units) {
            run_unit(p, o, at);
            mine++;
        }
        if (mine) atomic_fetch_add_explicit(p->done + i, mine, memory_order_release);
        for (int spins = 0; atomic_load_explicit(p->done + i, memory_order_acquire) < units; spins++) {
            if (spins > 4096) /* whoever holds the last unit may need this core */
                sched_yield();
#if X86
            else
                _mm_pause();
#endif
        }
    }
}

/* Run all operations for the rows that `p` describes. */
void forebay_run(program *p) {
    for (int64_t i = 0; i < p->n_ops; i++) {
        atomic_store_explicit(p->next + i, 0, memory_order_relaxed);
        atomic_store_explicit(p->done + i, 0, memory_order_relaxed);
    }
    forebay_team(run_program, p, 2);
}

/* ---- single operations, for tests and for whoever runs the rest in torch */

typedef struct {
    const uint8_t *weight;
    acts x;
    const float *in; /* [rows, n] */
    float *out;      /* [rows, outputs], padded to whole blocks */
    int64_t rows, n, k, outputs;
    int32_t bits, add;
} linear_job;

void forebay_linear(const linear_job *j) {
    for (int64_t row = 0; row < j->rows; row++) forebay_quantize_row(j->in + row * j->n, j->n, j->x, row, j->k);
    const int64_t size = forebay_block_bytes(j->bits, j->k), width = parts_of(j->outputs, LANES) * LANES;
    for (int64_t block = 0; block < width / LANES; block++)
        forebay_linear_block(j->weight + block * size, j->bits, j->x, j->k, j->rows, j->out + block * LANES, width, j->add);
}
