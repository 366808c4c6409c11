/* Compute: a duty cycle over launches, for all processes of the container together.
 *
 * The state file holds a credit of GPU time. It refills at the asked percentage of the clock, up to
 * what PERIOD_NS would give, and every stretch of time in which the GPU worked for the container is
 * taken from it. A launch needs a credit above zero; if there is none it waits on the CPU until
 * there is, so a kernel that overdrew is paid for afterwards and the average comes out right whatever
 * the kernels' length.
 *
 * When does the GPU work? Each stream of the process has a lane with two timed events: `begin` is
 * recorded before the first launch into an idle stream, `end` after every launch. While `end` has not
 * happened the stream was busy from the lane's beginning until now; once it has, the time between the
 * two events is how long it was. Stretches of several streams and processes overlap, and only their
 * union counts: a map in the state file has one bit for each 33 us of the last two seconds, and what
 * is taken from the credit is the bits that were not set before.
 *
 * How much may be queued? No more launches than are expected to fit the credit, judged by how long
 * earlier ones took; then the lanes are drained before the next. Draining polls, and gives up after
 * DRAIN_LIMIT_NS: a kernel may be waiting for another that this very thread has yet to launch.
 *
 * Nothing is recorded, asked or delayed while the stream is being captured, and the calling thread's
 * capture mode is relaxed around our own calls, which another thread's capture would forbid.
 */
#include <string.h>
#include <time.h>

#include "limiter.h"
#include "hooks.h"

#define PERIOD_NS 20000000
#define DRAIN_LIMIT_NS INT64_C(2000000000)
#define CREDIT_BOUND_NS INT64_C(1000000000000)
#define NAP_MIN_NS 20000
#define NAP_MAX_NS 5000000
#define LANES 64

struct lane {
    CUcontext context;
    CUstream stream;
    const void *thread; /* whose per-thread stream it is; NULL for others */
    CUevent begin, end;
    int64_t begin_ns;   /* when the first launch since it was idle came; 0: it is idle */
    int64_t counted_ns; /* up to here its work is in the busy map */
    int64_t mean_ns;    /* how long one launch takes; 0: not known yet */
    uint32_t launches;  /* since begin_ns */
    uint32_t pins;      /* threads between before and after */
    uint64_t last_use;
};

static struct lock lanes_lock;
static struct lane lanes[LANES];
static _Atomic uint64_t uses; /* of lanes; 0: compute is not limited, or nothing was launched */
static THREAD_LOCAL char this_thread; /* its address names the thread */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void nap(int64_t ns) {
    ns = ns < NAP_MIN_NS ? NAP_MIN_NS : ns > NAP_MAX_NS ? NAP_MAX_NS : ns;
    struct timespec time = {.tv_sec = 0, .tv_nsec = (long)ns};
    nanosleep(&time, NULL);
}

/* ---- the container's account of GPU time ------------------------------------------------------ */

static int64_t full_credit(void) { return (int64_t)account_limits()->cores_pct * PERIOD_NS / 100; }

/* Adds what the clock gave, takes `taken`, and only then cuts off at the full credit: a long kernel
 * pays with what came in while it ran. With the shared lock held. */
static int64_t update_credit(struct state *state, int64_t now, int64_t taken) {
    int64_t credit = atomic_load_explicit(&state->credit_ns, memory_order_relaxed);
    if (credit < -CREDIT_BOUND_NS || credit > CREDIT_BOUND_NS) /* the file can be written by anybody */
        credit = -CREDIT_BOUND_NS;
    int64_t since = now - atomic_load_explicit(&state->credit_at_ns, memory_order_relaxed);
    if (since > CREDIT_BOUND_NS || since < 0) /* the first time, or another clock */
        credit = BUSY_BUCKET_NS;
    else
        credit += since * account_limits()->cores_pct / 100;
    credit -= taken;
    if (credit > full_credit())
        credit = full_credit();
    atomic_store_explicit(&state->credit_ns, credit, memory_order_relaxed);
    atomic_store_explicit(&state->credit_at_ns, now, memory_order_relaxed);
    return credit;
}

static int64_t credit_now(void) {
    struct state *state = account_state();
    if (!account_lock())
        return -1;
    int64_t credit = update_credit(state, now_ns(), 0);
    account_unlock();
    return credit;
}

/* Sets the bits of [first, last) and says how many were not set. With the shared lock held. */
static uint64_t mark(struct state *state, uint64_t first, uint64_t last) {
    uint64_t fresh = 0;
    while (first < last) {
        uint64_t place = first % BUSY_BUCKETS, bit = place % 64;
        uint64_t count = last - first < 64 - bit ? last - first : 64 - bit;
        uint64_t mask = (count == 64 ? UINT64_MAX : (UINT64_C(1) << count) - 1) << bit;
        _Atomic uint64_t *word = &state->busy_map[place / 64];
        uint64_t before = atomic_load_explicit(word, memory_order_relaxed);
        fresh += (uint64_t)__builtin_popcountll(mask & ~before);
        atomic_store_explicit(word, before | mask, memory_order_relaxed);
        first += count;
    }
    return fresh;
}

static void clear(struct state *state, uint64_t first, uint64_t last) {
    if (last - first >= BUSY_BUCKETS)
        first = last - BUSY_BUCKETS;
    while (first < last) {
        uint64_t place = first % BUSY_BUCKETS, bit = place % 64;
        uint64_t count = last - first < 64 - bit ? last - first : 64 - bit;
        uint64_t mask = (count == 64 ? UINT64_MAX : (UINT64_C(1) << count) - 1) << bit;
        _Atomic uint64_t *word = &state->busy_map[place / 64];
        atomic_store_explicit(word, atomic_load_explicit(word, memory_order_relaxed) & ~mask, memory_order_relaxed);
        first += count;
    }
}

/* Takes the time from `from` to `until` from the credit, as far as it was not taken before. Gives
 * back up to where it counted, so that the rest of a bucket is counted with the next stretch. */
static int64_t spend(int64_t from, int64_t until) {
    struct state *state = account_state();
    uint64_t first = (uint64_t)from / BUSY_BUCKET_NS, last = (uint64_t)until / BUSY_BUCKET_NS, fresh = 0;
    if (until <= from || last <= first || !account_lock())
        return from;
    int64_t now = now_ns();
    uint64_t head = atomic_load_explicit(&state->busy_head, memory_order_relaxed);
    uint64_t newest = (uint64_t)now / BUSY_BUCKET_NS + 1;
    if (newest > head) {
        clear(state, head, newest);
        atomic_store_explicit(&state->busy_head, newest, memory_order_relaxed);
    }
    uint64_t oldest = newest - (newest < BUSY_BUCKETS ? newest : BUSY_BUCKETS);
    if (first < oldest) { /* too long ago to know what overlapped */
        uint64_t end = last < oldest ? last : oldest;
        fresh += end - first;
        first = end;
    }
    fresh += mark(state, first, last);
    int64_t taken = (int64_t)fresh * BUSY_BUCKET_NS;
    (void)update_credit(state, now, taken);
    atomic_store_explicit(&state->busy_ns,
                          atomic_load_explicit(&state->busy_ns, memory_order_relaxed) + (uint64_t)taken,
                          memory_order_relaxed);
    account_unlock();
    return (int64_t)(last * BUSY_BUCKET_NS);
}

/* ---- lanes; with lanes_lock held -------------------------------------------------------------- */

static struct lane *find_lane(CUcontext context, CUstream stream) {
    const void *thread = stream == CU_STREAM_PER_THREAD ? &this_thread : NULL;
    struct lane *oldest = NULL;
    for (int i = 0; i < LANES; i++) {
        struct lane *lane = &lanes[i];
        if (lane->begin != NULL && lane->context == context && lane->stream == stream && lane->thread == thread) {
            lane->last_use = ++uses;
            return lane;
        }
        if (lane->pins == 0 && (oldest == NULL || lane->last_use < oldest->last_use))
            oldest = lane;
    }
    if (oldest == NULL)
        return NULL;
    CUevent begin = NULL, end = NULL;
    if (oldest->begin != NULL && oldest->context == context) {
        begin = oldest->begin;
        end = oldest->end;
    } else if (CALL(cuEventCreate, &begin, 0) != CUDA_SUCCESS || CALL(cuEventCreate, &end, 0) != CUDA_SUCCESS) {
        return NULL;
    }
    *oldest = (struct lane){.context = context, .stream = stream, .thread = thread, .begin = begin, .end = end,
                            .mean_ns = oldest->mean_ns, .last_use = ++uses};
    return oldest;
}

/* Counts what the lane's stream did until now. True: it is idle. */
static bool settle_lane(struct lane *lane) {
    float milliseconds;
    if (lane->begin_ns == 0)
        return true;
    int64_t now = now_ns();
    if (lane->launches == 0 && lane->pins != 0)
        return false; /* the first launch is being made */
    CUresult done = lane->launches == 0 ? CUDA_SUCCESS : CALL(cuEventQuery, lane->end);
    if (done == CUDA_ERROR_NOT_READY) {
        lane->counted_ns = spend(lane->counted_ns, now);
        return false;
    }
    int64_t until = now; /* where the events fail (the context is gone, say): as if until now */
    if (lane->launches == 0)
        until = lane->begin_ns;
    else if (done == CUDA_SUCCESS && CALL(cuEventElapsedTime, &milliseconds, lane->begin, lane->end) == CUDA_SUCCESS)
        until = lane->begin_ns + (int64_t)((double)milliseconds * 1e6);
    until = until < now ? until : now;
    (void)spend(lane->counted_ns, until);
    if (lane->launches != 0) {
        int64_t mean = (until - lane->begin_ns) / lane->launches;
        lane->mean_ns = lane->mean_ns == 0 ? mean : (lane->mean_ns + mean) / 2;
    }
    lane->begin_ns = 0;
    lane->launches = 0;
    if (done != CUDA_SUCCESS && lane->pins == 0)
        lane->begin = NULL; /* whatever became of the events: the next launch makes new ones */
    return true;
}

static int64_t queued_ns(void) {
    int64_t queued = 0;
    for (int i = 0; i < LANES; i++)
        if (lanes[i].begin_ns != 0)
            queued += lanes[i].mean_ns * lanes[i].launches;
    return queued;
}

/* True: some lane still works. `left` is a guess at how long the longest will. */
static bool settle_all(int64_t *left) {
    bool busy = false;
    int64_t now = now_ns();
    *left = NAP_MIN_NS;
    for (int i = 0; i < LANES; i++) {
        if (settle_lane(&lanes[i]))
            continue;
        busy = true;
        int64_t rest = lanes[i].begin_ns + lanes[i].mean_ns * lanes[i].launches - now;
        if (rest > *left)
            *left = rest;
    }
    return busy;
}

static void nap_unlocked(int64_t ns) {
    lock_give(&lanes_lock);
    nap(ns);
    lock_take(&lanes_lock);
}

/* Waits until this process may queue one more launch. */
static void wait_for_credit(void) {
    int64_t give_up = 0, left;
    bool draining = false;
    for (;;) {
        int64_t credit = credit_now();
        if (credit > 0 && !draining && queued_ns() < credit)
            return;
        if (settle_all(&left)) {
            /* Something is queued: it must end before we know what it cost. */
            int64_t now = now_ns();
            if (give_up == 0)
                give_up = now + DRAIN_LIMIT_NS;
            if (now > give_up)
                return;
            draining = true;
            nap_unlocked(left * 3 / 4);
        } else {
            draining = false;
            if ((credit = credit_now()) > 0)
                return;
            nap_unlocked(-credit * 100 / account_limits()->cores_pct + 1);
        }
    }
}

/* ---- around a launch -------------------------------------------------------------------------- */

bool compute_before(CUstream stream, struct lane **lane) {
    CUcontext context = NULL;
    *lane = NULL;
    if (UNLIKELY(!account_attach()))
        return false;
    if (LIKELY(account_limits()->cores_pct >= 100) || graphs_capturing(stream, NULL))
        return true;
    if (CALL(cuCtxGetCurrent, &context) != CUDA_SUCCESS || context == NULL)
        return true; /* the launch will fail */
    int mode = graphs_relax();
    lock_take(&lanes_lock);
    struct lane *mine = find_lane(context, stream);
    if (mine != NULL) {
        mine->pins++;
        (void)settle_lane(mine);
    }
    wait_for_credit();
    if (mine != NULL && mine->begin_ns == 0) {
        mine->begin_ns = mine->counted_ns = now_ns();
        mine->launches = 0;
        (void)CALL(cuEventRecord, mine->begin, stream);
    }
    lock_give(&lanes_lock);
    graphs_restore(mode);
    *lane = mine;
    return true;
}

void compute_after(struct lane *lane, CUstream stream, CUresult launched) {
    if (lane == NULL)
        return;
    int mode = graphs_relax();
    lock_take(&lanes_lock);
    if (launched == CUDA_SUCCESS) {
        (void)CALL(cuEventRecord, lane->end, stream);
        lane->launches++;
    }
    lane->pins--;
    lock_give(&lanes_lock);
    graphs_restore(mode);
}

void compute_settle(void) {
    int64_t left;
    if (LIKELY(atomic_load_explicit(&uses, memory_order_relaxed) == 0))
        return;
    int mode = graphs_relax();
    lock_take(&lanes_lock);
    (void)settle_all(&left);
    lock_give(&lanes_lock);
    graphs_restore(mode);
}

void compute_forget(CUcontext context) {
    if (LIKELY(atomic_load_explicit(&uses, memory_order_relaxed) == 0))
        return;
    int mode = graphs_relax();
    lock_take(&lanes_lock);
    for (int i = 0; i < LANES; i++) {
        struct lane *lane = &lanes[i];
        if (lane->begin == NULL || lane->context != context || lane->pins != 0)
            continue;
        (void)settle_lane(lane);
        (void)CALL(cuEventDestroy_v2, lane->begin);
        (void)CALL(cuEventDestroy_v2, lane->end);
        *lane = (struct lane){0};
    }
    lock_give(&lanes_lock);
    graphs_restore(mode);
}

void compute_reset(void) {
    memset(lanes, 0, sizeof lanes);
    atomic_store_explicit(&uses, 0, memory_order_relaxed);
    atomic_store_explicit(&lanes_lock.word, 0, memory_order_relaxed);
}
