/* edgeagent's limiter: keeps one container within its share of a GPU.
 *
 * What it is. A shared library that the agent has preloaded into every process of a container by a
 * read-only mount over /etc/ld.so.preload. It stands between the program and libcuda.so.1: each
 * entry point that takes GPU memory or starts GPU work is answered by a function here, which counts,
 * refuses or delays, and otherwise calls the driver. A program that never calls CUDA never runs any
 * code of it but the first lines of dlsym: there is no constructor, no thread, no output.
 *
 * What it needs: three files in LIMITER_DIR, all mounted by the agent.
 *   libedgeagent-limiter.so   read-only: this library
 *   limits                    read-only: what the container may use (limits.c)
 *   state                     writable by every user of the container: what it uses (account.c)
 * Nothing else: no NVML, no CUDA headers, no environment variable, no glibc newer than 2.17.
 *
 * How it gets in the way (resolve.c). A program reaches the driver by being linked to it (our symbol
 * comes first in the search order), by dlsym, or by cuGetProcAddress. The last two are answered by
 * the real thing first; the pointer that comes back is then swapped if it is one that we replace, so
 * CUDA versions and per-thread-stream flags stay the driver's business. Only where the driver hands
 * out pointers that it does not export is the name looked at.
 *
 * Memory (account.c and records.c; memory.c, pools.c, physical.c, arrays.c, graphs.c, contexts.c). All
 * processes of the container share one account in the state file: a total, and one slot per process.
 * Every allocation is charged before the driver is asked and taken back if the driver refuses; what
 * would pass the limit is answered CUDA_ERROR_OUT_OF_MEMORY. A context that is destroyed takes its
 * memory with it. The limit is one sum over all GPUs that the container can see, since a share is
 * memory of one GPU. A process that died without freeing is noticed by the next one that runs out of
 * room, and its slot is emptied. The charge errs upwards where the driver does not tell the truth, and
 * is put right where it does (pools and graphs have a "reserved" figure).
 *
 * Compute (launches.c, compute.c). The container has a budget of GPU time that refills at the asked percentage.
 * Events around the launches say how long the GPU was busy with them; a launch that comes when the
 * budget is spent waits on the CPU. Nothing is ever done to a stream that is being captured.
 *
 * It fails closed: no limits file, no state file, a version that does not match, no free slot: every
 * allocation, every new context and every launch is refused with CUDA_ERROR_OUT_OF_MEMORY, and the
 * process says why on stderr once.
 *
 * What it is not: a wall. A program that wants to can reach the driver without passing here (system
 * calls, its own loader, dlmopen, a static binary, musl) or edit the state file. It is the
 * `cooperative` level; docs/isolation-limiter.md has the list.
 */
#ifndef EDGEAGENT_LIMITER_H
#define EDGEAGENT_LIMITER_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "cuda_abi.h"

#ifndef LIMITER_DIR
#define LIMITER_DIR "/usr/local/lib/edgeagent/limiter"
#endif

#define EXPORT __attribute__((visibility("default")))
#define LIKELY(x) __builtin_expect(!!(x), 1)
#define UNLIKELY(x) __builtin_expect(!!(x), 0)
#define THREAD_LOCAL _Thread_local __attribute__((tls_model("initial-exec")))

/* ---- limits.c: the read-only limits file ------------------------------------------------------ */

struct limits {
    uint64_t memory_bytes;   /* of all processes together */
    uint64_t overhead_bytes; /* charged once per process, for what the driver takes unseen */
    uint32_t cores_pct;      /* 1 to 100; 100: compute is not limited */
    bool unified;            /* the GPU shares the host's RAM: host allocations count */
};

/* Reads and checks a limits file. Returns NULL, or what is wrong with it. */
const char *limits_read(const char *path, struct limits *limits);
const char *limits_parse(const char *text, size_t length, struct limits *limits);

/* ---- lock.c: locks that need no thread library ------------------------------------------------ */

struct lock { _Atomic uint32_t word; }; /* zero is unlocked; between threads of one process */

void lock_take(struct lock *lock);
void lock_give(struct lock *lock);
void futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t timeout_ns);
void futex_wake(_Atomic uint32_t *word);

/* ---- account.c: the shared state file --------------------------------------------------------- */

#define STATE_MAGIC UINT64_C(0x314d494c45474445) /* "EDGELIM1" */
#define STATE_VERSION 1u
#define STATE_SLOTS 4096u
#define BUSY_BUCKETS 65536u /* of BUSY_BUCKET_NS: about the last two seconds */
#define BUSY_BUCKET_NS 32768

/* One process. `pid` is the process's own view of it, in the PID namespace `pid_ns`. */
struct slot {
    _Atomic uint32_t pid;     /* 0: free */
    _Atomic uint32_t pid_ns;  /* inode of /proc/self/ns/pid; 0: unknown */
    _Atomic uint64_t started; /* /proc/PID/stat field 22, clock ticks after boot */
    _Atomic uint64_t bytes;   /* charged now, overhead included */
    _Atomic uint64_t peak;
    _Atomic uint64_t refused; /* allocations refused */
    uint64_t spare[3];
};

struct state {
    _Atomic uint64_t magic;
    _Atomic uint32_t version;
    _Atomic uint32_t slot_count;
    _Atomic uint32_t lock;       /* owner's PID, its namespace's tag, and a waiters bit */
    _Atomic uint32_t slots_high; /* no slot at or beyond this one was ever used */
    _Atomic uint64_t total;      /* bytes charged to all slots */
    _Atomic uint64_t peak;
    _Atomic uint64_t refused;
    _Atomic uint64_t last_refused_bytes;
    _Atomic uint64_t reclaimed; /* slots emptied because their process was gone */
    /* compute.c */
    _Atomic int64_t credit_ns;
    _Atomic int64_t credit_at_ns; /* CLOCK_MONOTONIC */
    _Atomic uint64_t busy_ns;     /* GPU time used since the start */
    _Atomic uint64_t busy_head;   /* newest bucket of the map below */
    unsigned char spare[4096 - 96];
    _Atomic uint64_t busy_map[BUSY_BUCKETS / 64];
    struct slot slots[STATE_SLOTS];
};

_Static_assert(sizeof(struct slot) == 64, "the agent reads slots of 64 bytes");
_Static_assert(offsetof(struct state, busy_map) == 4096, "the agent knows where the map is");
_Static_assert(offsetof(struct state, slots) == 12288, "the agent knows where the slots are");

/* Reads the files and takes a slot, charging the overhead. True: the container's limits are known
 * and this process is accounted for. Cheap once it succeeded. */
bool account_attach(void);
bool account_charge(uint64_t bytes);        /* false: no room */
void account_charge_anyway(uint64_t bytes); /* already taken from the driver: may pass the limit */
void account_uncharge(uint64_t bytes);
bool account_know_limits(void);
uint64_t account_used(void); /* by living processes of the container */
void account_refused(uint64_t bytes);
const struct limits *account_limits(void); /* valid after account_know_limits or account_attach */
struct state *account_state(void);
bool account_lock(void); /* the shared lock, for compute.c; false: could not be had */
void account_unlock(void);

/* ---- records.c: what each handle of this process costs ---------------------------------------- */

enum record_kind {
    RECORD_NONE,
    /* Of a context, which takes them with it: owner is the context. */
    RECORD_DEVICE, /* CUdeviceptr of plain or managed memory */
    RECORD_ARRAY,
    RECORD_MIPMAP,
    RECORD_EXTERNAL,
    RECORD_HOST,       /* only on integrated GPUs */
    RECORD_REGISTERED, /* likewise */
    RECORD_OF_CONTEXT = RECORD_REGISTERED,
    RECORD_POOLED,   /* CUdeviceptr from a pool; owner: index of the pool */
    RECORD_GRAPH_PTR, /* CUdeviceptr made by a graph; owner: index of the graph */
    RECORD_HANDLE,     /* CUmemHandle; owner: the allocation's number; count: references to it */
    RECORD_MAPPING,    /* address; bytes: its length; owner: the allocation's number */
    RECORD_PHYSICAL,   /* an allocation's number; bytes: charged; count: handles and mappings of it */
    RECORD_EXEC,       /* CUgraphExec; owner: index of the graph */
};

struct record {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner;
    uint32_t count;
    uint32_t kind;
};

/* False: no memory for the table (the caller must undo). Replaces a record of the same kind and key. */
bool records_put(enum record_kind kind, uint64_t key, uint64_t bytes, uint64_t owner, uint32_t count);
bool records_get(enum record_kind kind, uint64_t key, struct record *found);
bool records_take(enum record_kind kind, uint64_t key, struct record *found); /* get and remove */
/* The record of a kind with key <= at < key + bytes. Looks at all of them. */
bool records_covering(enum record_kind kind, uint64_t at, struct record *found);
/* Forgets what a context takes with it; gives the bytes. */
uint64_t records_drop_context(uint64_t context);
void records_drop_kind(enum record_kind kind);
void records_reset(void); /* in a forked child */

/* ---- memory.c, pools.c, physical.c, graphs.c, contexts.c, compute.c; reset: in a forked child ---- */

#define REFUSED CUDA_ERROR_OUT_OF_MEMORY

/* Charges; where there is no room it first puts the pools' and graphs' charges right. */
bool memory_charge(uint64_t bytes);
uint64_t memory_round_up(uint64_t bytes); /* to what the driver gives out at least */
uint64_t memory_key(const void *handle);
bool memory_counts(const CUmemLocation *location); /* after account_attach */
/* After the driver's answer to an allocation: keeps the charge under the handle, or gives it back. */
CUresult memory_keep(CUresult result, enum record_kind kind, uint64_t key, uint64_t bytes);
/* After its answer to a free: `taken` is what was forgotten before it was asked. */
CUresult memory_let_go(CUresult result, const struct record *taken);

void pools_settle(void); /* makes their charges what the driver says */
void pools_forget(void); /* the device was reset */
void pools_reset(void);
void contexts_reset(void);
void physical_reset(void);

bool graphs_capturing(CUstream stream, CUgraph *graph); /* `graph` may be NULL */
int graphs_relax(void); /* allows calls that other threads' captures forbid; gives what to restore */
void graphs_restore(int mode);
/* Before a node is added: `raised` says by how much the graph's charge grew. */
bool graphs_reserve(CUgraph graph, uint64_t bytes, uint64_t *raised);
void graphs_unreserve(CUgraph graph, uint64_t bytes, uint64_t raised);
void graphs_own(CUgraph graph, CUdeviceptr pointer, uint64_t bytes);
void graphs_free_node(CUdeviceptr pointer);
void graphs_settle(void);
void graphs_launched(CUgraphExec exec);
void graphs_forget(void); /* the device was reset */
void graphs_reset(void);

struct lane;
/* Around every launch. `before` may wait; false: refuse the launch. `after` gets what it left. */
bool compute_before(CUstream stream, struct lane **lane);
void compute_after(struct lane *lane, CUstream stream, CUresult launched);
void compute_settle(void); /* after the program waited for the GPU */
void compute_forget(CUcontext context); /* before it is destroyed, and our events with it */
void compute_reset(void);

/* ---- resolve.c: the driver -------------------------------------------------------------------- */

enum entry {
#define ENTRY(symbol, name, version, stream, effect) ENTRY_##symbol,
#define HELPER(symbol) ENTRY_##symbol,
#include "entry_points.h"
    ENTRY_COUNT
};

/* The driver's function behind an entry point; NULL: this driver has none. */
void *driver_entry(enum entry entry);
CUresult driver_lacks(void); /* what to answer then */

#define DRIVER(symbol) ((__typeof__(&symbol))driver_entry(ENTRY_##symbol))
#define CALL(symbol, ...) (DRIVER(symbol) ? DRIVER(symbol)(__VA_ARGS__) : driver_lacks())

void resolve_reset(void);

/* Fork: everything of the parent's process that the child must not believe. */
void forked_child(void);

/* One line on stderr, once per process: why everything is refused. */
void complain_once(const char *what, const char *why);

#endif
