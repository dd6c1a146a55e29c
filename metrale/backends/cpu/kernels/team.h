/* team.h: a team of threads that runs an array of ops, each cut into tiles.
 *
 * The caller of mt_run works too; the others are plain pthreads that touch no Python object. One 64-bit word says all that
 * a thread needs to claim a tile:
 *
 *     word = op number << MT_TILE_BITS | tiles of that op which nobody has claimed yet
 *
 * A claim is one compare-and-swap that takes 1 from the word. Op numbers never repeat (40 bits), so a thread that slept
 * through any number of ops or runs cannot claim with what it read before: its swap fails. Only a thread that holds a
 * tile reads `ops` and `index`; they change only when no tile is held, so they need no lock, and a late thread
 * holds no pointer into a program that may be gone.
 *
 * Whoever finishes the last tile of an op starts the next one: it runs ops of one tile itself at once, without a
 * word to anybody, and publishes an op of more tiles with the first tile already its own. So nothing depends on any one
 * thread: one that the system took off its core while it held no tile delays nobody.
 *
 * Waiting is a spin of bounded time, then a futex. There is no yield: beside spinning neighbours a yielding thread gives
 * its slice away again and again.
 */
#ifndef METRALE_TEAM_H
#define METRALE_TEAM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  /* pthread_setname_np */
#endif

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include "futex.h"

#define MT_TILE_BITS 24
#define MT_MAX_TILES ((1 << MT_TILE_BITS) - 1)
#define MT_LEFT(word) ((int32_t)((word) & MT_MAX_TILES))
#define MT_NO_FAILURE UINT64_MAX
#define MT_CALLER 1u
#define MT_WORKER 2u

typedef int32_t (*mt_kernel)(const void *args, int32_t tile, int32_t tiles);

typedef struct mt_op {
    mt_kernel fn;
    const void *args;
    int64_t tiles;
} mt_op;

typedef struct mt_failure {
    int64_t op;
    int32_t tile, status;
} mt_failure;

typedef struct mt_team {
    /* What waiting threads read: written once an op (and by each claim). */
    _Alignas(64) _Atomic uint64_t word;
    _Atomic uint32_t epoch;  /* counts publications; sleepers wait for it to change */
    _Atomic uint32_t runs;   /* counts finished runs */
    _Alignas(64) _Atomic int64_t done;  /* finished tiles of the current op */
    /* Written only while no tile is held. */
    _Alignas(64) const mt_op *ops;
    int64_t count, index;
    uint64_t number;
    /* Rarely written. */
    _Alignas(64) _Atomic int32_t workers_asleep;
    _Atomic int32_t caller_asleep;
    _Atomic uint64_t failure;  /* lowest failing tile << 32 | status */
    _Atomic int32_t stop;
    int64_t spin_ns;
    int32_t threads, started;
    uint32_t forks;
    pthread_mutex_t lock;
    pthread_t *workers;
} mt_team;

static _Atomic uint32_t mt_forks;  /* forks this process descends from since the library was loaded */
static void mt_count_fork(void) { atomic_fetch_add(&mt_forks, 1); }
static int mt_watch_forks(void) { return pthread_atfork(NULL, NULL, mt_count_fork); }

/* Run one tile, unless a tile of this op has failed already. Of several failing tiles the lowest is kept. */
static inline void mt_tile(mt_team *t, const mt_op *op, int32_t tile) {
    if (atomic_load_explicit(&t->failure, memory_order_relaxed) != MT_NO_FAILURE) return;
    int32_t status = op->fn(op->args, tile, (int32_t)op->tiles);
    if (__builtin_expect(status != 0, 0)) {
        uint64_t mine = (uint64_t)(uint32_t)tile << 32 | (uint32_t)status;
        uint64_t old = atomic_load(&t->failure);
        while (mine < old && !atomic_compare_exchange_weak(&t->failure, &old, mine)) {}
    }
}

/* Make `word` (and what was written before) visible and wake sleepers that can help. */
static void mt_publish(mt_team *t, int32_t helpers, int wake_caller) {
    atomic_fetch_add(&t->epoch, 1);  /* sequentially consistent, as is the sleepers' side in mt_wait */
    if (wake_caller && atomic_load(&t->caller_asleep)) mt_futex_wake(&t->epoch, 1, MT_CALLER);
    if (helpers > 0 && atomic_load(&t->workers_asleep)) mt_futex_wake(&t->epoch, helpers, MT_WORKER);
}

/* Go on after the last tile of the current op. Returns the claimed word of a new op (its tile 0), or 0 when the run is over.
 * The caller of this function holds the only right to touch `ops` and `index`. */
static uint64_t mt_advance(mt_team *t) {
    for (;;) {
        if (t->index + 1 >= t->count || atomic_load(&t->failure) != MT_NO_FAILURE) {
            atomic_fetch_add_explicit(&t->runs, 1, memory_order_release);
            mt_publish(t, 0, 1);  /* from here on the program may be gone */
            return 0;
        }
        const mt_op *op = &t->ops[++t->index];
        if (op->tiles == 1) {
            mt_tile(t, op, 0);
        } else if (op->tiles > 1) {
            int32_t tiles = (int32_t)op->tiles;
            uint64_t word = ++t->number << MT_TILE_BITS | (uint32_t)(tiles - 1);
            atomic_store_explicit(&t->done, 0, memory_order_relaxed);
            atomic_store_explicit(&t->word, word, memory_order_release);
            mt_publish(t, tiles - 1, 1);
            return word + 1;
        }
    }
}

/* Try to claim a tile of any op (number 0) or of one op; returns the word before the claim, or 0. */
static inline uint64_t mt_claim(mt_team *t, uint64_t number) {
    uint64_t word = atomic_load_explicit(&t->word, memory_order_acquire);
    while (MT_LEFT(word) > 0 && (number == 0 || word >> MT_TILE_BITS == number)) {
        if (atomic_compare_exchange_weak_explicit(&t->word, &word, word - 1, memory_order_acq_rel, memory_order_acquire)) return word;
    }
    return 0;
}

/* Work from a claimed tile on, until there is none left to claim. */
static void mt_work(mt_team *t, uint64_t word) {
    while (word) {
        const mt_op *op = &t->ops[t->index];
        int64_t tiles = op->tiles, mine = 0;
        uint64_t number = word >> MT_TILE_BITS;
        do {
            mt_tile(t, op, (int32_t)tiles - MT_LEFT(word));
            mine++;
        } while ((word = mt_claim(t, number)));
        /* One addition for all tiles done here. After it `op` may be gone, unless it was the last. */
        if (atomic_fetch_add_explicit(&t->done, mine, memory_order_acq_rel) + mine != tiles) return;
        word = mt_advance(t);
    }
}

/* Wait until the epoch is no longer `seen`. */
static void mt_wait(mt_team *t, uint32_t seen, uint32_t role) {
    int64_t start = mt_now_ns();
    do {
        for (int i = 0; i < 32; i++) {
            if (atomic_load_explicit(&t->epoch, memory_order_acquire) != seen) return;
            mt_pause();
        }
    } while (mt_now_ns() - start < t->spin_ns);
    _Atomic int32_t *asleep = role == MT_CALLER ? &t->caller_asleep : &t->workers_asleep;
    atomic_fetch_add(asleep, 1);
    if (atomic_load(&t->epoch) == seen) mt_futex_wait(&t->epoch, seen, role, 0);
    atomic_fetch_sub(asleep, 1);
}

static void *mt_worker(void *arg) {
    mt_team *t = arg;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&t->epoch, memory_order_acquire);
        if (atomic_load(&t->stop)) return NULL;
        uint64_t word = mt_claim(t, 0);
        if (word) mt_work(t, word);
        else mt_wait(t, seen, MT_WORKER);
    }
}

static mt_team *mt_create(int32_t threads, int64_t spin_ns) {
    mt_team *t = NULL;
    if (posix_memalign((void **)&t, 64, sizeof *t)) return NULL;
    *t = (mt_team){.threads = threads, .spin_ns = spin_ns, .forks = atomic_load(&mt_forks)};
    t->workers = calloc((size_t)threads, sizeof *t->workers);
    if (!t->workers || pthread_mutex_init(&t->lock, NULL)) {
        free(t->workers);
        free(t);
        return NULL;
    }
    return t;
}

/* Start the workers; signals stay with the threads of the interpreter. Returns 0 or an errno. */
static int mt_start(mt_team *t) {
    sigset_t all, old;
    int error = 0;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (!error && t->started < t->threads - 1) {
        error = pthread_create(&t->workers[t->started], NULL, mt_worker, t);
        if (!error) pthread_setname_np(t->workers[t->started++], "metrale-worker");
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return error;
}

/* Say whether the workers were lost in a fork. A team that had none yet becomes the child's own. */
static inline int mt_forked(mt_team *t) {
    uint32_t forks = atomic_load(&mt_forks);
    if (t->forks == forks) return 0;
    if (t->started > 0) return 1;
    pthread_mutex_init(&t->lock, NULL);  /* a thread that does not exist here may have held it */
    t->forks = forks;
    return 0;
}

/* Run ops[0..count). Returns 0, 1 for a failed kernel (described in `failure`), 2 when a worker did not start,
 * 3 when the team was stopped. */
static int mt_run(mt_team *t, const mt_op *ops, int64_t count, int want_workers, mt_failure *failure) {
    pthread_mutex_lock(&t->lock);
    int result = 0;
    if (atomic_load(&t->stop)) {
        result = 3;
    } else if (want_workers && t->started < t->threads - 1 && mt_start(t)) {
        result = 2;
    } else {
        uint32_t runs = atomic_load(&t->runs);
        t->ops = ops;
        t->count = count;
        t->index = -1;
        atomic_store(&t->failure, MT_NO_FAILURE);
        mt_work(t, mt_advance(t));
        for (;;) {
            uint32_t seen = atomic_load_explicit(&t->epoch, memory_order_acquire);
            if (atomic_load_explicit(&t->runs, memory_order_acquire) != runs) break;
            uint64_t word = mt_claim(t, 0);
            if (word) mt_work(t, word);
            else mt_wait(t, seen, MT_CALLER);
        }
        uint64_t failed = atomic_load(&t->failure);
        if (failed != MT_NO_FAILURE) {
            *failure = (mt_failure){.op = t->index, .tile = (int32_t)(failed >> 32), .status = (int32_t)(uint32_t)failed};
            result = 1;
        }
    }
    pthread_mutex_unlock(&t->lock);
    return result;
}

/* Stop and join the workers; waits for a run in progress; harmless twice. In a forked child there is nothing to join. */
static void mt_stop(mt_team *t) {
    if (mt_forked(t)) {
        atomic_store(&t->stop, 1);
        t->started = 0;
        return;
    }
    pthread_mutex_lock(&t->lock);
    if (!atomic_exchange(&t->stop, 1)) {
        mt_publish(t, INT_MAX, 0);
        for (int32_t i = 0; i < t->started; i++) pthread_join(t->workers[i], NULL);
        t->started = 0;
    }
    pthread_mutex_unlock(&t->lock);
}

static void mt_destroy(mt_team *t) {
    pthread_mutex_destroy(&t->lock);
    free(t->workers);
    free(t);
}

#endif
