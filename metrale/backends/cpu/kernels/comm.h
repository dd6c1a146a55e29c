/* comm.h: collectives between ranks that are threads of one process, as kernels that a program may hold.
 *
 * Every rank runs the same collectives in the same order, each as one tile. A rank puts its arguments on the group's desk,
 * meets the others, works, and parts from them only when all are done with its buffers. A rank that fails or stays away
 * aborts the group: from then on every collective returns a status instead of waiting.
 */
#ifndef METRALE_COMM_H
#define METRALE_COMM_H

#include <stdlib.h>
#include <string.h>

#include "futex.h"

#define MT_COMM_ABORTED 1001
#define MT_COMM_TIMEOUT 1002
#define MT_COMM_MISMATCH 1003
#define MT_COMM_MAX_RANKS 64
#define MT_COMM_SPIN_NS 20000

enum { MT_ALL_REDUCE = 1, MT_ALL_GATHER, MT_BROADCAST };

typedef union {
    void *p;
    int64_t i;
    double f;
} mt_arg;

typedef struct mt_place {  /* what a rank brings to a collective */
    _Alignas(64) const void *data;
    int64_t kind, rows, row_bytes;
} mt_place;

/* gate = meetings << 32 | aborted flag | ranks that have come to the next one. One word, so that all ranks agree whether a
 * meeting took place: a rank that gives up sets the flag, and from then on nobody can complete it. */
#define MT_GATE_ABORTED 0x80000000u

typedef struct mt_group {
    _Alignas(64) _Atomic uint64_t gate;
    _Atomic uint32_t signal;  /* counts meetings, partings and aborts; what waiting ranks sleep on */
    _Atomic uint32_t left, partings;
    int32_t size;
    int64_t timeout_ns;
    mt_place desk[MT_COMM_MAX_RANKS];
} mt_group;

static mt_group *mt_group_create(int32_t size, int64_t timeout_ns) {
    mt_group *g = NULL;
    if (posix_memalign((void **)&g, 64, sizeof *g)) return NULL;
    memset(g, 0, sizeof *g);
    g->size = size;
    g->timeout_ns = timeout_ns;
    return g;
}

static void mt_group_signal(mt_group *g) {
    atomic_fetch_add(&g->signal, 1);
    mt_futex_wake(&g->signal, INT_MAX, 1);
}

/* Make every rank's present and later collective return; the group cannot be used again. */
static void mt_group_abort(mt_group *g) {
    atomic_fetch_or(&g->gate, MT_GATE_ABORTED);
    mt_group_signal(g);
}

static inline int mt_group_aborted(mt_group *g) { return (atomic_load(&g->gate) & MT_GATE_ABORTED) != 0; }

/* Wait for a signal after `seen`, a little by spinning: with fewer processors than ranks the others need this one. */
static void mt_group_wait(mt_group *g, uint32_t seen, int64_t deadline_ns) {
    int64_t start = mt_now_ns();
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load(&g->signal) != seen) return;
            mt_pause();
        }
    } while (mt_now_ns() - start < MT_COMM_SPIN_NS);
    mt_futex_wait(&g->signal, seen, 1, deadline_ns);
}

/* Come together: all ranks return 0, or all return another status. */
static int32_t mt_group_meet(mt_group *g) {
    uint64_t gate = atomic_load(&g->gate), next;
    do {
        if (gate & MT_GATE_ABORTED) return MT_COMM_ABORTED;
        next = (gate & 0x7fffffff) + 1 == (uint64_t)g->size ? ((gate >> 32) + 1) << 32 : gate + 1;
    } while (!atomic_compare_exchange_weak(&g->gate, &gate, next));
    uint64_t meeting = gate >> 32;
    if (next >> 32 != meeting) {
        mt_group_signal(g);
        return 0;
    }
    int64_t deadline = mt_now_ns() + g->timeout_ns;
    for (int32_t why = MT_COMM_ABORTED;;) {
        uint32_t seen = atomic_load(&g->signal);
        gate = atomic_load(&g->gate);
        if (gate >> 32 != meeting) return 0;
        if (gate & MT_GATE_ABORTED) return why;
        if (mt_now_ns() >= deadline) {
            why = MT_COMM_TIMEOUT;
            mt_group_abort(g);
        } else {
            mt_group_wait(g, seen, deadline);
        }
    }
}

/* Wait until no rank reads or writes another's buffers any more. Not to be aborted, and no need: whoever has met is inside
 * the same kernel and will be here soon; leaving early would free a buffer under a slower rank. */
static void mt_group_part(mt_group *g) {
    uint32_t parting = atomic_load(&g->partings);
    if (atomic_fetch_add(&g->left, 1) + 1 == (uint32_t)g->size) {
        atomic_store(&g->left, 0);
        atomic_fetch_add(&g->partings, 1);
        mt_group_signal(g);
        return;
    }
    for (;;) {
        uint32_t seen = atomic_load(&g->signal);
        if (atomic_load(&g->partings) != parting) return;
        mt_group_wait(g, seen, 0);
    }
}

/* Put this rank's part on the desk, meet, and check that all ranks called the same. After status 0 mt_group_part follows. */
static int32_t mt_group_enter(mt_group *g, int64_t rank, const mt_place *mine) {
    g->desk[rank] = *mine;
    int32_t status = mt_group_meet(g);
    if (status) return status;
    for (int32_t r = 0; r < g->size; r++) {
        const mt_place *p = &g->desk[r];
        if (p->kind != mine->kind || p->rows != mine->rows || p->row_bytes != mine->row_bytes) status = MT_COMM_MISMATCH;
    }
    if (!status) return 0;
    mt_group_part(g);  /* every rank has seen it before any goes on */
    mt_group_abort(g);
    return status;
}

/* args: group, rank, x, n. x (n,) float32 becomes the sum over the ranks, added in rank order: the same bits on every rank.
 * Rank r adds its slice of the numbers and writes it to every rank's x; slices do not overlap, so no copy is needed. */
static int32_t mt_all_reduce(const void *words, int32_t tile, int32_t tiles) {
    const mt_arg *a = words;
    (void)tile;
    (void)tiles;
    mt_group *g = a[0].p;
    int64_t rank = a[1].i, n = a[3].i;
    int32_t status = mt_group_enter(g, rank, &(mt_place){a[2].p, MT_ALL_REDUCE, n, 4});
    if (status) return status;
    for (int64_t i = n * rank / g->size; i < n * (rank + 1) / g->size; i++) {
        float sum = ((const float *)g->desk[0].data)[i];
        for (int32_t r = 1; r < g->size; r++) sum += ((const float *)g->desk[r].data)[i];
        for (int32_t r = 0; r < g->size; r++) ((float *)g->desk[r].data)[i] = sum;
    }
    mt_group_part(g);
    return 0;
}

/* args: group (null: one rank), rank, out, x, rows, row_bytes. Row t of out is row t of every rank's x, in rank order. */
static int32_t mt_all_gather(const void *words, int32_t tile, int32_t tiles) {
    const mt_arg *a = words;
    (void)tile;
    (void)tiles;
    mt_group *g = a[0].p;
    int64_t rank = a[1].i, rows = a[4].i, row_bytes = a[5].i;
    char *out = a[2].p;
    if (!g) {
        memcpy(out, a[3].p, (size_t)(rows * row_bytes));
        return 0;
    }
    int32_t status = mt_group_enter(g, rank, &(mt_place){a[3].p, MT_ALL_GATHER, rows, row_bytes});
    if (status) return status;
    for (int64_t t = 0; t < rows; t++) {
        for (int32_t r = 0; r < g->size; r++) {
            memcpy(out + (t * g->size + r) * row_bytes, (const char *)g->desk[r].data + t * row_bytes, (size_t)row_bytes);
        }
    }
    mt_group_part(g);
    return 0;
}

/* args: group, rank, x, bytes, root. x of every rank becomes the root's. */
static int32_t mt_broadcast(const void *words, int32_t tile, int32_t tiles) {
    const mt_arg *a = words;
    (void)tile;
    (void)tiles;
    mt_group *g = a[0].p;
    int64_t rank = a[1].i, bytes = a[3].i, root = a[4].i;
    int32_t status = mt_group_enter(g, rank, &(mt_place){a[2].p, MT_BROADCAST, root, bytes});
    if (status) return status;
    if (rank != root) memcpy(a[2].p, g->desk[root].data, (size_t)bytes);
    mt_group_part(g);
    return 0;
}

#endif
