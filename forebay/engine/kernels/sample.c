/* Logits to token ids: one row at a time, rows in parallel. */
#include "common.h"

typedef struct {
    float *logits; /* [rows, width], overwritten */
    const float *temperature, *top_p, *min_p;
    const int64_t *top_k;
    const double *draw;                     /* [rows], in [0, 1) */
    const int64_t *banned, *banned_from;    /* ids of row r: banned[banned_from[r] .. banned_from[r + 1]] */
    int64_t *tokens;                        /* [rows]; -1 where the logits are not finite */
    int32_t *order;                         /* [rows, vocab] */
    int64_t rows, vocab, width;
    atomic_llong next;
} sample_job;

/* The index of the largest of n values (the first of equals), or -1 where it is not finite or one of them is NaN. */
INLINE int64_t best_of(const float *x, int64_t n) {
    v8 top = splat(-__builtin_inff());
    i8 odd = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 v = load(x + i);
        top = max8(top, v);
        odd |= v != v;
    }
    float high = top8(top);
    for (int lane = 0; lane < 8; lane++)
        if (odd[lane]) return -1;
    for (; i < n; i++) {
        if (x[i] != x[i]) return -1;
        high = x[i] > high ? x[i] : high;
    }
    if (!(high < __builtin_inff() && high > -__builtin_inff())) return -1;
    for (i = 0; x[i] != high; i++) {}
    return i;
}

/* x = e^((x - top) / heat) and their sum. */
INLINE double soften(float *x, int64_t n, float top, float heat) {
    double sum = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 w = exp_negative((load(x + i) - splat(top)) / splat(heat));
        store(x + i, w);
        sum += (double)sum8(w);
    }
    for (; i < n; i++) sum += (double)(x[i] = exp_one((x[i] - top) / heat));
    return sum;
}

/* Min-p: weights below `bound` times the heaviest, which is 1, become 0. Their new sum. */
INLINE double thin(float *x, int64_t n, float bound) {
    double sum = 0;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        v8 w = load(x + i);
        w = (v8)((i8)w & (w >= splat(bound)));
        store(x + i, w);
        sum += (double)sum8(w);
    }
    for (; i < n; i++) sum += (double)(x[i] = x[i] >= bound ? x[i] : 0);
    return sum;
}

/* The heaviest first, of equals the lower id: heap sort, because it needs no memory and has no bad case. */
INLINE int before(const float *w, int32_t a, int32_t b) { return w[a] > w[b] || (w[a] == w[b] && a < b); }

INLINE void sink(const float *w, int32_t *ids, int64_t at, int64_t n) {
    for (int64_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && before(w, ids[child], ids[child + 1])) child++;
        if (!before(w, ids[at], ids[child])) return;
        int32_t swap = ids[at];
        ids[at] = ids[child], ids[child] = swap;
    }
}

INLINE void sort(const float *w, int32_t *ids, int64_t n) {
    for (int64_t i = n / 2; i-- > 0;) sink(w, ids, i, n);
    for (int64_t i = n; i-- > 1;) {
        int32_t swap = ids[0];
        ids[0] = ids[i], ids[i] = swap;
        sink(w, ids, 0, i);
    }
}

/* Top-k, then top-p of what is left: `ids` gets the kept ids, the heaviest first. Only ids that can be among them are
 * sorted: those above a bound that falls until it lets in enough, at last all that weigh anything. */
INLINE int64_t keep(const float *w, int64_t n, double sum, int64_t top_k, double top_p, int32_t *ids) {
    const int64_t k = top_k > 0 && top_k < n ? top_k : n;
    int64_t count = 0;
    for (float bound = 0.01f;; bound = bound > 1e-12f ? bound * 0.01f : 0) {
        double in = 0;
        count = 0;
        for (int64_t i = 0; i < n; i++)
            if (w[i] > bound) ids[count++] = (int32_t)i, in += (double)w[i];
        /* Top-p is a share of what top-k leaves: with a top-k all of that must be known. */
        if (count >= k || (k == n && in > top_p * sum) || bound <= 0) break;
    }
    sort(w, ids, count);
    count = count < k ? count : k;
    double all = sum, reached = 0;
    if (k < n) {
        all = 0;
        for (int64_t i = 0; i < count; i++) all += (double)w[ids[i]];
    }
    int64_t kept = 0;
    while (kept < count && reached <= top_p * all) reached += (double)w[ids[kept++]];
    return kept;
}

CLONED static int64_t sample_row(const sample_job *j, int64_t row) {
    float *x = j->logits + row * j->width;
    for (int64_t i = j->banned_from[row]; i < j->banned_from[row + 1]; i++) x[j->banned[i]] = -__builtin_inff();
    const int64_t best = best_of(x, j->vocab);
    if (best < 0 || !(j->temperature[row] > 0)) return best;
    double sum = soften(x, j->vocab, x[best], j->temperature[row]);
    if (j->min_p[row] > 0) sum = thin(x, j->vocab, j->min_p[row]);
    double seen = 0;
    if (j->top_k[row] <= 0 && j->top_p[row] >= 1) {
        const double aim = j->draw[row] * sum;
        int64_t last = best;
        for (int64_t i = 0; i < j->vocab; i++) {
            if (x[i] > 0) last = i;
            if ((seen += (double)x[i]) > aim && x[i] > 0) return i;
        }
        return last;
    }
    int32_t *ids = j->order + row * j->vocab;
    const int64_t kept = keep(x, j->vocab, sum, j->top_k[row], (double)j->top_p[row], ids);
    double all = 0;
    for (int64_t i = 0; i < kept; i++) all += (double)x[ids[i]];
    for (int64_t i = 0; i < kept; i++)
        if ((seen += (double)x[ids[i]]) > j->draw[row] * all) return ids[i];
    return ids[kept - 1];
}

static void sample_work(void *arg) {
    sample_job *j = arg;
    int64_t row;
    while ((row = atomic_fetch_add(&j->next, 1)) < j->rows) j->tokens[row] = sample_row(j, row);
}

void forebay_sample(sample_job *j) {
    atomic_store(&j->next, 0);
    forebay_team(sample_work, j, j->rows);
}
