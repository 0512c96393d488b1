/* Paged attention and the writing of K and V. */
#include "common.h"

/* AHEAD: pages from the one in work to the one that is fetched; 1, 2 and 8 were slower, and so was fetching into L1. */
enum { AHEAD = 4, SPLIT = 256, MAX_ROWS = 64 };

INLINE const char *block_of(const attend_job *j, int32_t layer, int64_t page, int kv, int head, int type) {
    return (const char *)j->pool +
           (((page * j->n_layers + layer) * 2 + kv) * j->kv_heads + head) * block_bytes(j->dim, type);
}

/* Up to four rows at once, each with two sums in registers: what a row adds, as long as R says that it is there. */
#define EACH_ROW(what) what(0) what(1) what(2) what(3)
#define SUMS(r) v8 low##r = {0}, high##r = {0};
#define ADD(r) \
    if (R > r) { \
        v8 x = NAME(all)(factors + r * stride); \
        low##r += x * low, high##r += x * high; \
    }
#define SCALE(r) \
    if (R > r) low##r *= low, high##r *= high;
#define LOAD(r) \
    if (R > r) low##r = load(to + r * to_stride), high##r = load(to + r * to_stride + 8);
#define STORE(r) \
    if (R > r) store(to + r * to_stride, low##r), store(to + r * to_stride + 8, high##r);

#define BY_FOUR(count, r, call) \
    for (int r = 0; r < (count); r += 4) switch ((count) - r) { \
        case 1: { enum { R = 1 }; call; } break; \
        case 2: { enum { R = 2 }; call; } break; \
        case 3: { enum { R = 3 }; call; } break; \
        default: { enum { R = 4 }; call; } }

#define NAME(x) x##_plain
#include "attend.h"
#undef NAME
#if X86
#include <immintrin.h>
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NAME(x) x##_avx2
#include "attend.h"
#undef NAME
#pragma GCC pop_options
#define PICK(f, ...) (forebay_has() ? f##_avx2(__VA_ARGS__) : f##_plain(__VA_ARGS__))
#else
#define PICK(f, ...) f##_plain(__VA_ARGS__)
#endif

/* `unit`: one of n_units * kv_heads. */
void forebay_attend_unit(const attend_job *j, int32_t layer, int64_t unit) { PICK(attend, j, layer, unit); }

/* `unit`: one of n_merges * heads. */
void forebay_merge_unit(const attend_job *j, int64_t unit) { PICK(merge, j, unit); }

void forebay_write_rows(const write_job *w, int64_t first, int64_t last) { PICK(write, w, first, last); }

static void attend_work(void *arg) {
    attend_job *j = arg;
    int64_t at;
    while ((at = atomic_fetch_add(&j->next, 1)) < j->n_units * j->kv_heads) forebay_attend_unit(j, j->layer, at);
}

static void merge_work(void *arg) {
    attend_job *j = arg;
    int64_t at;
    while ((at = atomic_fetch_add(&j->next, 1)) < j->n_merges * j->heads) forebay_merge_unit(j, at);
}

void forebay_attend(attend_job *j) {
    atomic_store(&j->next, 0);
    forebay_team(attend_work, j, j->n_units * j->kv_heads);
    if (!j->n_merges) return;
    atomic_store(&j->next, 0);
    forebay_team(merge_work, j, j->n_merges * j->heads);
}

void forebay_write(const write_job *w) { forebay_write_rows(w, 0, w->rows); }
