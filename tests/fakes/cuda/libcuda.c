/* A stand-in for libcuda.so.1: memory that is only counted, and a GPU that is only a clock.
 *
 * It keeps the driver's rules that matter to the limiter: exported names with versions and
 * per-thread-stream twins, cuGetProcAddress 1 and 2, pools that keep what is freed into them until a
 * wait, physical memory that lives as long as a handle or mapping, graphs that take memory when
 * launched, captures that forbid calls and record what is done to their streams.
 *
 * The GPU runs one kernel at a time, in the order of launching, for all processes that share
 * FAKE_CUDA_TIMELINE (a file); a kernel called k250 takes 250 us. Environment:
 *   FAKE_CUDA_MEMORY_MIB        of the GPU, for each process alone; 8192
 *   FAKE_CUDA_TIMELINE          see above; default: the process has a GPU of its own
 *   FAKE_CUDA_PRIVATE_POINTERS  cuGetProcAddress gives addresses that are not exported
 *   FAKE_CUDA_GRAPH_FACTOR      graphs take this many times what their nodes hold at once
 */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"

#define MIB (1024ull * 1024)
#define OOM CUDA_ERROR_OUT_OF_MEMORY
#define BAD CUDA_ERROR_INVALID_VALUE
enum { CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };

/* Each function is written as impl_X; X is exported as a jump to it, so that there are two addresses. */
#if defined(__x86_64__)
#define JUMP "jmp"
#else
#define JUMP "b"
#endif
#define PUBLIC(name) \
    __asm__(".text\n.globl " #name "\n.type " #name ",@function\n" #name ": " JUMP " impl_" #name "\n");
#define API(name, ...)                                            \
    extern CUresult name(__VA_ARGS__);                            \
    __attribute__((visibility("hidden"))) CUresult impl_##name(__VA_ARGS__); \
    PUBLIC(name)                                                  \
    CUresult impl_##name(__VA_ARGS__)

/* ---- state ------------------------------------------------------------------------------------ */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t memory_used;
static pid_t initialized_by;

struct timeline {
    int spin;
    int64_t free_at_ns; /* when the engine has done all that was launched */
    int64_t busy_ns;    /* all kernel time ever launched */
};
static struct timeline own_timeline, *timeline = &own_timeline;

struct CUctx_st { int device; };
struct CUfunc_st { int64_t ns; };
struct CUevent_st { int64_t at_ns; bool recorded; };
struct CUmemPoolHandle_st { uint64_t used, reserved, threshold; bool host, destroyed; };
struct CUgraph_st {
    int64_t ns;
    uint64_t live, peak;
    int nodes;
    bool invalid;
};
struct CUgraphExec_st { int64_t ns; uint64_t peak; };
#define DEPTH 1024 /* launches that a stream holds before the launching thread must wait */
struct CUstream_st {
    int64_t tail_ns, done_ns[DEPTH];
    unsigned launched;
    CUgraph capture;
    int capture_mode;
};

static struct CUctx_st primary;
static _Thread_local CUcontext current;
static _Thread_local int thread_mode; /* 0: global, as the driver's default */
static struct CUstream_st null_stream;
static _Thread_local struct CUstream_st thread_stream;
static int captures; /* not relaxed ones */
static struct CUgraph_st *capturing[64];
static struct CUmemPoolHandle_st default_pool;
static struct CUmemPoolHandle_st *pools[256] = {&default_pool};
static int pool_count = 1;
static uint64_t graph_reserved;

/* Allocations by handle: a hash table whose places are never given back, only emptied. */
struct thing {
    uint64_t key, bytes;
    CUcontext context;
    int kind, refs;
    struct CUmemPoolHandle_st *pool;
};
enum { EMPTY, GONE, DEVICE, POOLED, GRAPH, HANDLE, MAPPED, ARRAY, EXTERNAL, HOST };
#define THINGS (1u << 18)
static struct thing things[THINGS];

static struct thing *find(uint64_t key, bool add) {
    struct thing *gone = NULL;
    for (unsigned i = (unsigned)((key * 0x9e3779b97f4a7c15ull) >> 40) % THINGS;; i = (i + 1) % THINGS) {
        if (things[i].kind == EMPTY)
            return add ? (gone ? gone : &things[i]) : NULL;
        if (things[i].kind == GONE)
            gone = gone ? gone : &things[i];
        else if (things[i].key == key)
            return &things[i];
    }
}

static struct thing *put(uint64_t key, int kind, uint64_t bytes) {
    struct thing *thing = find(key, true);
    *thing = (struct thing){.key = key, .bytes = bytes, .context = current, .kind = kind, .refs = 1};
    return thing;
}

static uint64_t total_memory(void) {
    static uint64_t total;
    if (total == 0) {
        const char *mib = getenv("FAKE_CUDA_MEMORY_MIB");
        total = (mib ? strtoull(mib, NULL, 10) : 8192) * MIB;
    }
    return total;
}

static bool take(uint64_t bytes) {
    if (bytes > total_memory() - memory_used)
        return false;
    memory_used += bytes;
    return true;
}

/* The driver soon gives the same address again: so do we, for the same size. */
static uint64_t freed_address, freed_bytes;

static uint64_t next_address(uint64_t bytes) {
    static uint64_t next = 0x7f0000000000ull;
    uint64_t address = freed_address;
    if (address != 0 && freed_bytes == bytes) {
        freed_address = 0;
        return address;
    }
    address = next;
    next += (bytes + 0x1fffff) & ~0x1fffffull;
    return address;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void sleep_until(int64_t ns) {
    struct timespec at = {.tv_sec = ns / 1000000000, .tv_nsec = ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL) != 0)
        ;
}

/* ---- what captures forbid --------------------------------------------------------------------- */

static CUresult forbidden(void) {
    if (__atomic_load_n(&captures, __ATOMIC_ACQUIRE) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; i++)
        if (capturing[i] != NULL)
            capturing[i]->invalid = true;
    pthread_mutex_unlock(&lock);
    return CAPTURE_UNSUPPORTED;
}
#define UNSAFE                       \
    do {                             \
        CUresult no = forbidden();   \
        if (no != CUDA_SUCCESS)      \
            return no;               \
    } while (0)

static CUstream stream_of(CUstream stream, bool per_thread) {
    if (stream == CU_STREAM_PER_THREAD || (stream == NULL && per_thread))
        return &thread_stream;
    return stream == NULL || stream == (CUstream)0x1 ? &null_stream : stream;
}

/* ---- start, devices, contexts ----------------------------------------------------------------- */

API(cuInit, unsigned int flags) {
    const char *path = getenv("FAKE_CUDA_TIMELINE");
    (void)flags;
    if (initialized_by != 0)
        return initialized_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
    if (path != NULL) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0 || ftruncate(fd, 4096) != 0)
            return 999;
        void *map = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (map == MAP_FAILED)
            return 999;
        timeline = map;
    }
    initialized_by = getpid();
    return CUDA_SUCCESS;
}

static CUresult started(void) {
    return initialized_by == getpid() ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

API(cuDriverGetVersion, int *version) { *version = 13040; return CUDA_SUCCESS; }
API(cuDeviceGetCount, int *count) { *count = 1; return started(); }
API(cuDeviceGet, CUdevice *device, int ordinal) { *device = ordinal; return ordinal == 0 ? started() : 101; }
API(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device) { (void)device; *bytes = total_memory(); return CUDA_SUCCESS; }
API(cuDeviceTotalMem, unsigned int *bytes, CUdevice device) { (void)device; *bytes = 0xffffffffu; return CUDA_SUCCESS; }

static CUresult make_context(CUcontext *context) {
    if (started() != CUDA_SUCCESS)
        return CUDA_ERROR_NOT_INITIALIZED;
    *context = current = calloc(1, sizeof **context);
    return CUDA_SUCCESS;
}
API(cuCtxCreate, CUcontext *c, unsigned int f, CUdevice d) { (void)f, (void)d; return make_context(c); }
API(cuCtxCreate_v2, CUcontext *c, unsigned int f, CUdevice d) { (void)f, (void)d; return make_context(c); }
API(cuCtxCreate_v3, CUcontext *c, void *a, int n, unsigned int f, CUdevice d) { (void)a, (void)n, (void)f, (void)d; return make_context(c); }
API(cuCtxCreate_v4, CUcontext *c, void *p, unsigned int f, CUdevice d) { (void)p, (void)f, (void)d; return make_context(c); }
static void end_context(CUcontext context) {
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < THINGS; i++)
        if (things[i].context == context && (things[i].kind == DEVICE || things[i].kind >= ARRAY)) {
            memory_used -= things[i].bytes;
            things[i].kind = GONE;
        }
    if (current == context)
        current = NULL;
    pthread_mutex_unlock(&lock);
}
API(cuCtxDestroy_v2, CUcontext context) { end_context(context); free(context); return CUDA_SUCCESS; }
static int primary_holders;
API(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device) {
    (void)device;
    *context = &primary;
    primary_holders++;
    return started();
}
static void end_primary(void) {
    primary_holders = 0;
    end_context(&primary);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < pool_count; i++) {
        memory_used -= pools[i]->host ? 0 : pools[i]->reserved;
        pools[i]->used = pools[i]->reserved = 0;
    }
    memory_used -= graph_reserved;
    graph_reserved = 0;
    pthread_mutex_unlock(&lock);
}
API(cuDevicePrimaryCtxRelease_v2, CUdevice device) {
    (void)device;
    if (--primary_holders == 0)
        end_primary();
    return CUDA_SUCCESS;
}
API(cuDevicePrimaryCtxReset_v2, CUdevice device) { (void)device; end_primary(); return CUDA_SUCCESS; }
API(cuDevicePrimaryCtxGetState, CUdevice device, unsigned int *flags, int *active) {
    (void)device, *flags = 0;
    *active = primary_holders != 0;
    return CUDA_SUCCESS;
}
API(cuCtxSetCurrent, CUcontext context) { current = context; return CUDA_SUCCESS; }
API(cuCtxGetCurrent, CUcontext *context) { *context = current; return CUDA_SUCCESS; }
API(cuCtxGetDevice, CUdevice *device) { *device = 0; return current != NULL ? CUDA_SUCCESS : 201; }

/* ---- memory ----------------------------------------------------------------------------------- */

API(cuMemGetInfo_v2, size_t *available, size_t *total) {
    *available = total_memory() - memory_used;
    *total = total_memory();
    return current != NULL ? CUDA_SUCCESS : 201;
}
API(cuMemGetInfo, unsigned int *available, unsigned int *total) { *available = *total = 0xffffffffu; return CUDA_SUCCESS; }

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, int kind) {
    UNSAFE;
    if (bytes == 0 || current == NULL)
        return bytes == 0 ? BAD : 201;
    pthread_mutex_lock(&lock);
    bool room = take(bytes);
    if (room) {
        *pointer = next_address(bytes);
        put(*pointer, kind, bytes);
    }
    pthread_mutex_unlock(&lock);
    return room ? CUDA_SUCCESS : OOM;
}

API(cuMemAlloc_v2, CUdeviceptr *pointer, size_t bytes) { return allocate(pointer, bytes, DEVICE); }
API(cuMemAlloc, unsigned int *pointer, unsigned int bytes) { *pointer = 4096; (void)bytes; return CUDA_SUCCESS; }
API(cuMemAlloc_v3, CUdeviceptr *pointer, size_t bytes, int what) { (void)what; return allocate(pointer, bytes, DEVICE); }
API(cuMemAllocManaged, CUdeviceptr *pointer, size_t bytes, unsigned int flags) { (void)flags; return allocate(pointer, bytes, DEVICE); }
API(cuMemAllocPitch_v2, CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element) {
    (void)element;
    *pitch = (width + 1023) / 1024 * 1024;
    return allocate(pointer, *pitch * height, DEVICE);
}

static void shrink(struct CUmemPoolHandle_st *pool, uint64_t keep) {
    uint64_t right = pool->used > keep ? pool->used : keep;
    if (pool->reserved > right) {
        if (!pool->host)
            memory_used -= pool->reserved - right;
        pool->reserved = right;
    }
}

static void shrink_all(void) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < pool_count; i++)
        shrink(pools[i], pools[i]->destroyed ? 0 : pools[i]->threshold);
    pthread_mutex_unlock(&lock);
}

static CUresult release(CUdeviceptr pointer) {
    pthread_mutex_lock(&lock);
    struct thing *thing = find(pointer, false);
    CUresult result = CUDA_SUCCESS;
    if (thing == NULL || thing->kind > GRAPH) {
        result = BAD;
    } else {
        if (thing->kind == DEVICE) {
            memory_used -= thing->bytes;
            freed_address = pointer;
            freed_bytes = thing->bytes;
        }
        if (thing->kind == POOLED)
            thing->pool->used -= thing->bytes;
        if (thing->kind != GRAPH)
            thing->kind = GONE;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

API(cuMemFree_v2, CUdeviceptr pointer) {
    UNSAFE;
    CUresult result = release(pointer);
    if (result == CUDA_SUCCESS)
        shrink_all();
    return result;
}

static CUresult graph_alloc(CUgraph graph, CUdeviceptr *pointer, size_t bytes) {
    pthread_mutex_lock(&lock);
    graph->nodes++;
    graph->live += bytes;
    if (graph->live > graph->peak)
        graph->peak = graph->live;
    *pointer = next_address(bytes);
    put(*pointer, GRAPH, bytes);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult graph_free(CUgraph graph, CUdeviceptr pointer) {
    pthread_mutex_lock(&lock);
    struct thing *thing = find(pointer, false);
    graph->nodes++;
    if (thing != NULL && thing->kind == GRAPH)
        graph->live -= thing->bytes;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

static CUresult from_pool(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream) {
    if (bytes == 0)
        return BAD;
    if (stream->capture != NULL)
        return graph_alloc(stream->capture, pointer, bytes);
    pthread_mutex_lock(&lock);
    uint64_t more = 0;
    if (pool->used + bytes > pool->reserved)
        more = (pool->used + bytes - pool->reserved + 2 * MIB - 1) / (2 * MIB) * (2 * MIB);
    bool room = pool->host || take(more);
    if (room) {
        pool->reserved += more;
        pool->used += bytes;
        *pointer = next_address(bytes);
        put(*pointer, POOLED, bytes)->pool = pool;
    }
    pthread_mutex_unlock(&lock);
    return room ? CUDA_SUCCESS : OOM;
}

API(cuMemAllocAsync, CUdeviceptr *p, size_t n, CUstream s) { return from_pool(p, n, &default_pool, stream_of(s, false)); }
API(cuMemAllocAsync_ptsz, CUdeviceptr *p, size_t n, CUstream s) { return from_pool(p, n, &default_pool, stream_of(s, true)); }
API(cuMemAllocFromPoolAsync, CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream s) { return from_pool(p, n, pool, stream_of(s, false)); }
API(cuMemAllocFromPoolAsync_ptsz, CUdeviceptr *p, size_t n, CUmemoryPool pool, CUstream s) { return from_pool(p, n, pool, stream_of(s, true)); }

static CUresult free_ordered(CUdeviceptr pointer, CUstream stream) {
    return stream->capture != NULL ? graph_free(stream->capture, pointer) : release(pointer);
}
API(cuMemFreeAsync, CUdeviceptr pointer, CUstream stream) { return free_ordered(pointer, stream_of(stream, false)); }
API(cuMemFreeAsync_ptsz, CUdeviceptr pointer, CUstream stream) { return free_ordered(pointer, stream_of(stream, true)); }

API(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *properties) {
    *pool = calloc(1, sizeof **pool);
    (*pool)->host = properties->location.type > CU_MEM_LOCATION_TYPE_DEVICE;
    pthread_mutex_lock(&lock);
    pools[pool_count++] = *pool;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API(cuMemPoolDestroy, CUmemoryPool pool) { pool->destroyed = true; shrink_all(); return CUDA_SUCCESS; }
API(cuMemPoolTrimTo, CUmemoryPool pool, size_t keep) {
    pthread_mutex_lock(&lock);
    shrink(pool, keep);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API(cuMemPoolSetAttribute, CUmemoryPool pool, int attribute, void *value) {
    if (attribute == 4)
        pool->threshold = *(uint64_t *)value;
    return CUDA_SUCCESS;
}
API(cuMemPoolGetAttribute, CUmemoryPool pool, int attribute, void *value) {
    UNSAFE;
    pthread_mutex_lock(&lock);
    *(uint64_t *)value = attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? pool->reserved : pool->used;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API(cuDeviceGetMemPool, CUmemoryPool *pool, CUdevice device) { (void)device; *pool = &default_pool; return CUDA_SUCCESS; }
API(cuDeviceGetDefaultMemPool, CUmemoryPool *pool, CUdevice device) { (void)device; *pool = &default_pool; return CUDA_SUCCESS; }

/* Virtual memory: a handle's thing counts handles and mappings; a mapping's names its handle. */
API(cuMemAddressReserve, CUdeviceptr *pointer, size_t bytes, size_t align, CUdeviceptr at, unsigned long long flags) {
    (void)align, (void)at, (void)flags;
    pthread_mutex_lock(&lock);
    *pointer = next_address(bytes);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API(cuMemAddressFree, CUdeviceptr pointer, size_t bytes) { (void)pointer, (void)bytes; return CUDA_SUCCESS; }

static CUresult make_handle(CUmemHandle *handle, size_t bytes, bool host) {
    static uint64_t next = 1;
    pthread_mutex_lock(&lock);
    bool room = host || take(bytes);
    if (room) {
        *handle = next++;
        put(*handle, HANDLE, host ? 0 : bytes);
    }
    pthread_mutex_unlock(&lock);
    return room ? CUDA_SUCCESS : OOM;
}
API(cuMemCreate, CUmemHandle *handle, size_t bytes, const CUmemAllocationProp *properties, unsigned long long flags) {
    (void)flags;
    return bytes == 0 ? BAD : make_handle(handle, bytes, properties->location.type > CU_MEM_LOCATION_TYPE_DEVICE);
}
API(cuMemImportFromShareableHandle, CUmemHandle *handle, void *os_handle, int type) {
    (void)os_handle, (void)type;
    return make_handle(handle, 0, true); /* the memory is another process's */
}
static void drop_handle(struct thing *thing) {
    if (--thing->refs == 0) {
        memory_used -= thing->bytes;
        thing->kind = GONE;
    }
}
API(cuMemRelease, CUmemHandle handle) {
    pthread_mutex_lock(&lock);
    struct thing *thing = find(handle, false);
    if (thing != NULL)
        drop_handle(thing);
    pthread_mutex_unlock(&lock);
    return thing != NULL ? CUDA_SUCCESS : BAD;
}
API(cuMemMap, CUdeviceptr pointer, size_t bytes, size_t offset, CUmemHandle handle, unsigned long long flags) {
    (void)offset, (void)flags;
    pthread_mutex_lock(&lock);
    struct thing *thing = find(handle, false);
    if (thing != NULL) {
        thing->refs++;
        put(pointer, MAPPED, bytes)->pool = (void *)(uintptr_t)handle;
    }
    pthread_mutex_unlock(&lock);
    return thing != NULL ? CUDA_SUCCESS : BAD;
}
API(cuMemUnmap, CUdeviceptr pointer, size_t bytes) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    for (CUdeviceptr at = pointer; at < pointer + bytes && result == CUDA_SUCCESS;) {
        struct thing *mapping = find(at, false);
        if (mapping == NULL || mapping->kind != MAPPED) {
            result = BAD;
            break;
        }
        at += mapping->bytes;
        drop_handle(find((uint64_t)(uintptr_t)mapping->pool, false));
        mapping->kind = GONE;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
API(cuMemRetainAllocationHandle, CUmemHandle *handle, void *address) {
    pthread_mutex_lock(&lock);
    struct thing *mapping = find((uint64_t)(uintptr_t)address, false);
    if (mapping != NULL) {
        *handle = (uint64_t)(uintptr_t)mapping->pool;
        find(*handle, false)->refs++;
    }
    pthread_mutex_unlock(&lock);
    return mapping != NULL ? CUDA_SUCCESS : BAD;
}

static CUresult make_opaque(void **handle, uint64_t bytes, int kind, bool host) {
    pthread_mutex_lock(&lock);
    bool room = host || take(bytes);
    if (room) {
        *handle = malloc(16);
        put((uint64_t)(uintptr_t)*handle, kind, host ? 0 : bytes);
    }
    pthread_mutex_unlock(&lock);
    return room ? CUDA_SUCCESS : OOM;
}
static CUresult destroy_opaque(void *handle) {
    pthread_mutex_lock(&lock);
    struct thing *thing = find((uint64_t)(uintptr_t)handle, false);
    if (thing != NULL) {
        memory_used -= thing->bytes;
        thing->kind = GONE;
    }
    pthread_mutex_unlock(&lock);
    if (thing == NULL)
        return CUDA_ERROR_INVALID_HANDLE;
    free(handle);
    return CUDA_SUCCESS;
}
static uint64_t texels(uint64_t w, uint64_t h, uint64_t d) { return w * (h ? h : 1) * (d ? d : 1); }
API(cuArrayCreate_v2, CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d) {
    return make_opaque((void **)array, texels(d->Width, d->Height, 1) * 4 * d->NumChannels, ARRAY, false);
}
API(cuArray3DCreate_v2, CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d) {
    return make_opaque((void **)array, texels(d->Width, d->Height, d->Depth) * 4 * d->NumChannels, ARRAY, false);
}
API(cuMipmappedArrayCreate, CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels) {
    uint64_t bytes = 0;
    for (unsigned l = 0; l < levels; l++)
        bytes += texels(d->Width >> l, d->Height >> l, d->Depth >> l) * 4 * d->NumChannels;
    return make_opaque((void **)array, bytes, ARRAY, false);
}
API(cuArrayDestroy, CUarray array) { return destroy_opaque(array); }
API(cuMipmappedArrayDestroy, CUmipmappedArray array) { return destroy_opaque(array); }
API(cuImportExternalMemory, CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *d) {
    return make_opaque((void **)memory, d->size, EXTERNAL, false);
}
API(cuDestroyExternalMemory, CUexternalMemory memory) { return destroy_opaque(memory); }
API(cuMemHostAlloc, void **p, size_t n, unsigned int flags) { (void)flags; return make_opaque(p, n, HOST, true); }
API(cuMemAllocHost_v2, void **p, size_t n) { return make_opaque(p, n, HOST, true); }
API(cuMemFreeHost, void *p) { return destroy_opaque(p); }
API(cuMemHostRegister_v2, void *p, size_t n, unsigned int flags) { (void)p, (void)n, (void)flags; return CUDA_SUCCESS; }
API(cuMemHostUnregister, void *p) { (void)p; return CUDA_SUCCESS; }

/* ---- streams, events, kernels ----------------------------------------------------------------- */

API(cuStreamCreate, CUstream *stream, unsigned int flags) { (void)flags; *stream = calloc(1, sizeof **stream); return CUDA_SUCCESS; }
API(cuStreamDestroy_v2, CUstream stream) { free(stream); return CUDA_SUCCESS; }
API(cuModuleLoadData, void **module, const void *image) { (void)image; *module = &primary; return CUDA_SUCCESS; }
API(cuModuleGetFunction, CUfunction *function, void *module, const char *name) {
    (void)module;
    *function = malloc(sizeof **function);
    (*function)->ns = strtoll(name + 1, NULL, 10) * 1000;
    return CUDA_SUCCESS;
}

static void run_on_gpu(CUstream stream, int64_t ns) {
    unsigned place = stream->launched++ % DEPTH;
    if (stream->launched > DEPTH)
        sleep_until(stream->done_ns[place]);
    while (__atomic_exchange_n(&timeline->spin, 1, __ATOMIC_ACQUIRE))
        sched_yield();
    int64_t start = now_ns();
    if (start < stream->tail_ns)
        start = stream->tail_ns;
    if (start < timeline->free_at_ns)
        start = timeline->free_at_ns;
    stream->tail_ns = timeline->free_at_ns = stream->done_ns[place] = start + ns;
    timeline->busy_ns += ns;
    __atomic_store_n(&timeline->spin, 0, __ATOMIC_RELEASE);
}

static CUresult launch(CUstream stream, int64_t ns) {
    if (current == NULL)
        return 201;
    if (stream->capture != NULL) {
        stream->capture->nodes++;
        stream->capture->ns += ns;
    } else if (ns != 0) {
        run_on_gpu(stream, ns);
    }
    return CUDA_SUCCESS;
}

#define GRID unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared
#define UNUSED_GRID (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared
API(cuLaunchKernel, CUfunction f, GRID, CUstream s, void **p, void **x) { UNUSED_GRID, (void)p, (void)x; return launch(stream_of(s, false), f->ns); }
API(cuLaunchKernel_ptsz, CUfunction f, GRID, CUstream s, void **p, void **x) { UNUSED_GRID, (void)p, (void)x; return launch(stream_of(s, true), f->ns); }
API(cuLaunchKernelEx, const CUlaunchConfig *c, CUfunction f, void **p, void **x) { (void)p, (void)x; return launch(stream_of(c->hStream, false), f->ns); }
API(cuLaunchKernelEx_ptsz, const CUlaunchConfig *c, CUfunction f, void **p, void **x) { (void)p, (void)x; return launch(stream_of(c->hStream, true), f->ns); }
API(cuLaunchCooperativeKernel, CUfunction f, GRID, CUstream s, void **p) { UNUSED_GRID, (void)p; return launch(stream_of(s, false), f->ns); }
API(cuLaunchCooperativeKernel_ptsz, CUfunction f, GRID, CUstream s, void **p) { UNUSED_GRID, (void)p; return launch(stream_of(s, true), f->ns); }
API(cuLaunchGridAsync, CUfunction f, int w, int h, CUstream s) { (void)w, (void)h; return launch(stream_of(s, false), f->ns); }

static CUresult wait_stream(CUstream stream) {
    UNSAFE;
    if (stream->capture != NULL)
        return CAPTURE_UNSUPPORTED;
    sleep_until(stream->tail_ns);
    shrink_all();
    return CUDA_SUCCESS;
}
API(cuStreamSynchronize, CUstream stream) { return wait_stream(stream_of(stream, false)); }
API(cuStreamSynchronize_ptsz, CUstream stream) { return wait_stream(stream_of(stream, true)); }
API(cuCtxSynchronize, void) {
    UNSAFE;
    sleep_until(__atomic_load_n(&timeline->free_at_ns, __ATOMIC_RELAXED));
    shrink_all();
    return CUDA_SUCCESS;
}
API(cuCtxSynchronize_v2, CUcontext context) { (void)context; return impl_cuCtxSynchronize(); }

API(cuEventCreate, CUevent *event, unsigned int flags) { (void)flags; *event = calloc(1, sizeof **event); return CUDA_SUCCESS; }
API(cuEventDestroy_v2, CUevent event) { free(event); return CUDA_SUCCESS; }
API(cuEventRecord, CUevent event, CUstream handle) {
    CUstream stream = stream_of(handle, false);
    if (stream->capture != NULL) {
        stream->capture->nodes++; /* visible to a test that counts what it captured */
        return CUDA_SUCCESS;
    }
    int64_t now = now_ns();
    event->at_ns = now > stream->tail_ns ? now : stream->tail_ns;
    event->recorded = true;
    return CUDA_SUCCESS;
}
API(cuEventQuery, CUevent event) {
    UNSAFE;
    return event->at_ns <= now_ns() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API(cuEventSynchronize, CUevent event) { UNSAFE; sleep_until(event->at_ns); shrink_all(); return CUDA_SUCCESS; }
API(cuEventElapsedTime, float *milliseconds, CUevent first, CUevent last) {
    if (!first->recorded || !last->recorded)
        return CUDA_ERROR_INVALID_HANDLE;
    if (last->at_ns > now_ns())
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(last->at_ns - first->at_ns) / 1e6);
    return CUDA_SUCCESS;
}

/* ---- graphs and captures ---------------------------------------------------------------------- */

API(cuThreadExchangeStreamCaptureMode, int *mode) {
    int old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

static void note_capture(CUgraph graph, bool begins) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 64; i++)
        if (capturing[i] == (begins ? NULL : graph)) {
            capturing[i] = begins ? graph : NULL;
            break;
        }
    pthread_mutex_unlock(&lock);
}

static CUresult begin_capture(CUstream stream, int mode) {
    if (stream == &null_stream)
        return CAPTURE_UNSUPPORTED;
    stream->capture = calloc(1, sizeof *stream->capture);
    stream->capture_mode = mode;
    note_capture(stream->capture, true);
    if (mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        __atomic_fetch_add(&captures, 1, __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}
API(cuStreamBeginCapture_v2, CUstream stream, int mode) { return begin_capture(stream_of(stream, false), mode); }
API(cuStreamBeginCapture_v2_ptsz, CUstream stream, int mode) { return begin_capture(stream_of(stream, true), mode); }

static CUresult end_capture(CUstream stream, CUgraph *graph) {
    CUgraph captured = stream->capture;
    if (captured == NULL)
        return BAD;
    stream->capture = NULL;
    note_capture(captured, false);
    if (stream->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED)
        __atomic_fetch_sub(&captures, 1, __ATOMIC_RELEASE);
    *graph = captured->invalid ? NULL : captured;
    return captured->invalid ? CAPTURE_INVALIDATED : CUDA_SUCCESS;
}
API(cuStreamEndCapture, CUstream stream, CUgraph *graph) { return end_capture(stream_of(stream, false), graph); }
API(cuStreamEndCapture_ptsz, CUstream stream, CUgraph *graph) { return end_capture(stream_of(stream, true), graph); }

API(cuStreamIsCapturing, CUstream stream, int *status) {
    *status = stream_of(stream, false)->capture != NULL;
    return CUDA_SUCCESS;
}
API(cuStreamGetCaptureInfo_v2, CUstream handle, int *status, uint64_t *id, CUgraph *graph, const CUgraphNode **d, size_t *n) {
    CUstream stream = stream_of(handle, false);
    *status = stream->capture != NULL;
    (void)id;
    if (graph != NULL)
        *graph = stream->capture;
    if (d != NULL)
        *d = NULL;
    if (n != NULL)
        *n = 0;
    return CUDA_SUCCESS;
}

API(cuGraphCreate, CUgraph *graph, unsigned int flags) { (void)flags; *graph = calloc(1, sizeof **graph); return CUDA_SUCCESS; }
API(cuGraphGetNodes, CUgraph graph, CUgraphNode *nodes, size_t *count) { (void)nodes; *count = (size_t)graph->nodes; return CUDA_SUCCESS; }
API(cuGraphDestroy, CUgraph graph) { free(graph); return CUDA_SUCCESS; }
API(cuGraphAddMemAllocNode, CUgraphNode *node, CUgraph graph, const CUgraphNode *d, size_t n, CUDA_MEM_ALLOC_NODE_PARAMS *p) {
    (void)node, (void)d, (void)n;
    return graph_alloc(graph, &p->dptr, p->bytesize);
}
API(cuGraphAddMemFreeNode, CUgraphNode *node, CUgraph graph, const CUgraphNode *d, size_t n, CUdeviceptr pointer) {
    (void)node, (void)d, (void)n;
    return graph_free(graph, pointer);
}
static CUresult add_node(CUgraph graph, CUgraphNodeParams *p) {
    if (p->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        return graph_alloc(graph, &p->u.alloc.dptr, p->u.alloc.bytesize);
    if (p->type == CU_GRAPH_NODE_TYPE_MEM_FREE)
        return graph_free(graph, p->u.free.dptr);
    graph->nodes++;
    return CUDA_SUCCESS;
}
API(cuGraphAddNode, CUgraphNode *node, CUgraph g, const CUgraphNode *d, size_t n, CUgraphNodeParams *p) { (void)node, (void)d, (void)n; return add_node(g, p); }
API(cuGraphAddNode_v2, CUgraphNode *node, CUgraph g, const CUgraphNode *d, const void *e, size_t n, CUgraphNodeParams *p) { (void)node, (void)d, (void)e, (void)n; return add_node(g, p); }
API(cuGraphAddNode_v3, CUgraphNode *node, CUgraph g, const CUgraphNode *d, const void *e, size_t n, CUgraphNodeParams *p) { (void)node, (void)d, (void)e, (void)n; return add_node(g, p); }

static CUresult instantiate(CUgraphExec *exec, CUgraph graph) {
    *exec = calloc(1, sizeof **exec);
    (*exec)->ns = graph->ns;
    (*exec)->peak = graph->peak;
    return CUDA_SUCCESS;
}
API(cuGraphInstantiate_v2, CUgraphExec *x, CUgraph g, CUgraphNode *e, char *log, size_t n) { (void)e, (void)log, (void)n; return instantiate(x, g); }
API(cuGraphInstantiateWithFlags, CUgraphExec *x, CUgraph g, unsigned long long flags) { (void)flags; return instantiate(x, g); }
API(cuGraphInstantiateWithParams, CUgraphExec *x, CUgraph g, void *p) { (void)p; return instantiate(x, g); }
API(cuGraphInstantiateWithParams_ptsz, CUgraphExec *x, CUgraph g, void *p) { (void)p; return instantiate(x, g); }
API(cuGraphExecDestroy, CUgraphExec exec) { free(exec); return CUDA_SUCCESS; }

static CUresult launch_graph(CUgraphExec exec, CUstream stream) {
    const char *factor = getenv("FAKE_CUDA_GRAPH_FACTOR");
    uint64_t wanted = exec->peak * (factor ? strtoull(factor, NULL, 10) : 1);
    pthread_mutex_lock(&lock);
    bool room = wanted <= graph_reserved || take(wanted - graph_reserved);
    if (room && wanted > graph_reserved)
        graph_reserved = wanted;
    pthread_mutex_unlock(&lock);
    return room ? launch(stream, exec->ns) : OOM;
}
API(cuGraphLaunch, CUgraphExec exec, CUstream stream) { return launch_graph(exec, stream_of(stream, false)); }
API(cuGraphLaunch_ptsz, CUgraphExec exec, CUstream stream) { return launch_graph(exec, stream_of(stream, true)); }
API(cuDeviceGraphMemTrim, CUdevice device) {
    (void)device;
    pthread_mutex_lock(&lock);
    memory_used -= graph_reserved;
    graph_reserved = 0;
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}
API(cuDeviceGetGraphMemAttribute, CUdevice device, int attribute, void *value) {
    UNSAFE;
    (void)device, (void)attribute;
    *(uint64_t *)value = graph_reserved;
    return CUDA_SUCCESS;
}

/* ---- for the tests ---------------------------------------------------------------------------- */

/* GPU time that was really worked off until now, on the shared time-line. */
__attribute__((visibility("default"))) int64_t fake_busy_ns(void) {
    while (__atomic_exchange_n(&timeline->spin, 1, __ATOMIC_ACQUIRE))
        sched_yield();
    int64_t left = timeline->free_at_ns - now_ns(), busy = timeline->busy_ns - (left > 0 ? left : 0);
    __atomic_store_n(&timeline->spin, 0, __ATOMIC_RELEASE);
    return busy;
}
__attribute__((visibility("default"))) uint64_t fake_memory_used(void) {
    pthread_mutex_lock(&lock);
    uint64_t used = memory_used;
    pthread_mutex_unlock(&lock);
    return used;
}

/* ---- cuGetProcAddress ------------------------------------------------------------------------- */

API(cuGetProcAddress, const char *name, void **function, int version, uint64_t flags);
API(cuGetProcAddress_v2, const char *name, void **function, int version, uint64_t flags, int *status);

static const struct {
    const char *name;
    int version;
    void *plain, *plain_private, *ptsz, *ptsz_private;
} NAMES[] = {
#define ONE(name, version, symbol) {name, version, symbol, impl_##symbol, NULL, NULL}
#define TWO(name, version, symbol) {name, version, symbol, impl_##symbol, symbol##_ptsz, impl_##symbol##_ptsz}
    ONE("cuInit", 2000, cuInit), ONE("cuDriverGetVersion", 2020, cuDriverGetVersion),
    ONE("cuDeviceGetCount", 2000, cuDeviceGetCount), ONE("cuDeviceGet", 2000, cuDeviceGet),
    ONE("cuDeviceTotalMem", 2000, cuDeviceTotalMem), ONE("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2),
    ONE("cuCtxCreate", 2000, cuCtxCreate), ONE("cuCtxCreate", 3020, cuCtxCreate_v2),
    ONE("cuCtxCreate", 11040, cuCtxCreate_v3), ONE("cuCtxCreate", 12050, cuCtxCreate_v4),
    ONE("cuCtxSetCurrent", 4000, cuCtxSetCurrent), ONE("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
    ONE("cuMemGetInfo", 2000, cuMemGetInfo), ONE("cuMemGetInfo", 3020, cuMemGetInfo_v2),
    ONE("cuMemAlloc", 2000, cuMemAlloc), ONE("cuMemAlloc", 3020, cuMemAlloc_v2),
    ONE("cuMemAlloc", 14000, cuMemAlloc_v3), ONE("cuMemFree", 3020, cuMemFree_v2),
    ONE("cuMemAllocManaged", 6000, cuMemAllocManaged), ONE("cuMemAllocPitch", 3020, cuMemAllocPitch_v2),
    TWO("cuMemAllocAsync", 11020, cuMemAllocAsync), TWO("cuMemFreeAsync", 11020, cuMemFreeAsync),
    TWO("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync), ONE("cuMemCreate", 10020, cuMemCreate),
    ONE("cuMemRelease", 10020, cuMemRelease), ONE("cuArrayCreate", 3020, cuArrayCreate_v2),
    ONE("cuArrayDestroy", 2000, cuArrayDestroy), ONE("cuMemHostAlloc", 2020, cuMemHostAlloc),
    ONE("cuGraphAddMemAllocNode", 11040, cuGraphAddMemAllocNode), ONE("cuGraphAddNode", 12020, cuGraphAddNode),
    ONE("cuGraphAddNode", 12030, cuGraphAddNode_v2), ONE("cuGraphAddNode", 13040, cuGraphAddNode_v3),
    TWO("cuLaunchKernel", 4000, cuLaunchKernel), TWO("cuLaunchKernelEx", 11060, cuLaunchKernelEx),
    TWO("cuGraphLaunch", 10000, cuGraphLaunch), TWO("cuStreamSynchronize", 2000, cuStreamSynchronize),
    ONE("cuGetProcAddress", 11030, cuGetProcAddress), ONE("cuGetProcAddress", 12000, cuGetProcAddress_v2),
};

static CUresult get_proc(const char *name, void **function, int version, uint64_t flags, int *status) {
    bool private = getenv("FAKE_CUDA_PRIVATE_POINTERS") != NULL, known = false;
    int best = -1;
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++)
        if (strcmp(NAMES[i].name, name) == 0) {
            known = true;
            if (NAMES[i].version <= version && (best < 0 || NAMES[i].version > NAMES[best].version))
                best = (int)i;
        }
    if (status != NULL)
        *status = best >= 0 ? 0 : known ? 2 : 1;
    *function = NULL;
    if (best < 0)
        return status != NULL ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    if (flags == CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM && NAMES[best].ptsz != NULL)
        *function = private ? NAMES[best].ptsz_private : NAMES[best].ptsz;
    else
        *function = private ? NAMES[best].plain_private : NAMES[best].plain;
    return CUDA_SUCCESS;
}

CUresult impl_cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    return get_proc(name, function, version, flags, NULL);
}
CUresult impl_cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    return get_proc(name, function, version, flags, status);
}
