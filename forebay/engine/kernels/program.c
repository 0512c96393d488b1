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

#define NAME(x) x##_plain
#include "rows.h"
#undef NAME
#if X86
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NAME(x) x##_avx2
#include "rows.h"
#undef NAME
#pragma GCC pop_options
#define PICK(f, ...) (forebay_has() ? f##_avx2(__VA_ARGS__) : f##_plain(__VA_ARGS__))
#else
#define PICK(f, ...) f##_plain(__VA_ARGS__)
#endif

/* ---- operations. Field by field the structures of __init__.py. */

enum { EMBED, NORM, QUANTIZE, SILU, GELU, ADD_NORM, LINEAR, HEADS, ATTEND, MERGE };
enum { MAX_WIDTH = 1 << 16, LINEAR_ROWS = 64 };

typedef struct {
    int32_t kind, layer;
    int32_t bits, add;    /* linear: 4 or 8, and whether to add to what is in `out`; embed: its bits */
    int32_t sampled;      /* the rows are those that sample: norm gathers them */
    float factor;         /* embed: on every value */
    int64_t n, k;         /* linear: outputs and padded inputs. Others: values and what they are padded to */
    const void *weight;
    const float *in;
    float *out;
    int64_t in_width, out_width; /* from row to row */
    /* heads, each NULL where the model has none: [outputs] of q, k and v; [dim]; [positions, dim / 2] */
    const float *bias, *q_norm, *k_norm, *cos, *sin;
} op;

typedef struct {
    const op *ops;
    atomic_llong *next, *done; /* [n_ops] */
    attend_job *attend;
    write_job *write;
    acts x;
    const int64_t *ids, *positions, *sample_rows;
    int64_t n_ops, rows, n_samples;
    float eps; /* of all norms */
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

/* A row of q, k and v becomes what attention takes: bias, norm of each head, rotation; K and V go to their page. */
static void heads_row(const program *p, const op *o, int64_t row) {
    const int64_t dim = p->attend->dim, heads = p->attend->heads, kv_heads = p->attend->kv_heads;
    float *x = o->out + row * o->out_width;
    if (o->bias) PICK(add_row, o->bias, x, (heads + 2 * kv_heads) * dim);
    for (int64_t head = 0; o->q_norm && head < heads + kv_heads; head++)
        PICK(norm_row, x + head * dim, head < heads ? o->q_norm : o->k_norm, x + head * dim, dim, p->eps);
    if (o->cos) {
        const int64_t at = p->positions[row] * (dim / 2);
        PICK(rope_row, x, heads + kv_heads, dim, o->cos + at, o->sin + at);
    }
    write_job w = *p->write;
    w.layer = o->layer;
    forebay_write_rows(&w, row, row + 1);
}

static void linear_unit(const program *p, const op *o, int64_t unit) {
    const int64_t rows = o->sampled ? p->n_samples : p->rows, span = span_of(rows);
    const int64_t tiles = parts_of(rows, LINEAR_ROWS), first = unit % tiles * LINEAR_ROWS;
    const int64_t count = least(LINEAR_ROWS, rows - first), size = forebay_block_bytes(o->bits, o->k);
    const int64_t group = first * (o->k / GROUP);
    acts x = {p->x.q + first * o->k, p->x.scale + group, p->x.sum + group, p->x.zero + group};
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
            for (int64_t i = 0; i < o->n; i++) o->out[row * o->out_width + i] = scratch[i] * o->factor;
            break;
        }
        case NORM:
            PICK(norm_row, o->in + (o->sampled ? p->sample_rows[row] : row) * o->in_width, o->weight, scratch, o->n,
                 p->eps);
            PICK(quantize_row, scratch, o->n, p->x, row, o->k);
            break;
        case QUANTIZE:
            PICK(quantize_row, o->in + row * o->in_width, o->n, p->x, row, o->k);
            break;
        case SILU:
        case GELU:
            PICK(gate_row, o->in + row * o->in_width, o->in + row * o->in_width + o->n, scratch, o->n, o->kind == GELU);
            PICK(quantize_row, scratch, o->n, p->x, row, o->k);
            break;
        case ADD_NORM:
            PICK(norm_row, o->in + row * o->in_width, o->weight, scratch, o->n, p->eps);
            PICK(add_row, scratch, o->out + row * o->out_width, o->n);
            break;
        case LINEAR:
            linear_unit(p, o, row);
            break;
        case HEADS:
            heads_row(p, o, row);
            break;
        case ATTEND:
            forebay_attend_unit(p->attend, o->layer, row);
            break;
        case MERGE:
            forebay_merge_unit(p->attend, row);
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
    for (int64_t row = 0; row < j->rows; row++) PICK(quantize_row, j->in + row * j->n, j->n, j->x, row, j->k);
    const int64_t size = forebay_block_bytes(j->bits, j->k), width = parts_of(j->outputs, LANES) * LANES;
    for (int64_t block = 0; block < width / LANES; block++)
        forebay_linear_block(j->weight + block * size, j->bits, j->x, j->k, j->rows, j->out + block * LANES, width, j->add);
}
