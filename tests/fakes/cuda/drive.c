/* Does to the driver what its arguments say, one after the other, and prints what came back.
 *
 *   drive HOW COMMAND...
 *   HOW: how the driver's functions are found: dlsym, default (RTLD_DEFAULT), proc1, proc2, proc2ptsz
 *        (cuGetProcAddress 1, 2, 2 with per-thread streams); `linked` in the build that is linked.
 *   COMMAND: name[:number...]; sizes are MiB. Each prints one line "name rc [value...]".
 * What is made gets a number, counting from 0 in the order of making whatever it is.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_abi.h"
#include "hooks.h"

#define MIB (1024ull * 1024)

CUresult cuInit(unsigned int);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuStreamCreate(CUstream *, unsigned int);
CUresult cuModuleLoadData(void **, const void *);
CUresult cuModuleGetFunction(CUfunction *, void *, const char *);
CUresult cuMemAddressReserve(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
CUresult cuMemPoolSetAttribute(CUmemoryPool, int, void *);
CUresult cuStreamBeginCapture_v2(CUstream, int);
CUresult cuGraphCreate(CUgraph *, unsigned int);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *);
int64_t fake_busy_ns(void);
uint64_t fake_memory_used(void);

static const char *how;
static void *driver;

__attribute__((unused)) static const struct { const char *symbol, *name; int version; } NAMES[] = {
#define ENTRY(symbol, name, version, stream, effect) {#symbol, name, version},
#include "entry_points.h"
};

__attribute__((unused)) static void *find(const char *symbol) {
    void *function = NULL;
    int status;
    if (strncmp(how, "proc", 4) == 0 && strncmp(symbol, "fake_", 5) != 0) {
        uint64_t flags = strcmp(how, "proc2ptsz") == 0 ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : 0;
        for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
            if (strcmp(NAMES[i].symbol, symbol) != 0)
                continue;
            if (how[4] == '1') {
                __typeof__(&cuGetProcAddress) get = (__typeof__(get))dlsym(driver, "cuGetProcAddress");
                get(NAMES[i].name, &function, NAMES[i].version, flags);
            } else {
                __typeof__(&cuGetProcAddress_v2) get = (__typeof__(get))dlsym(driver, "cuGetProcAddress_v2");
                get(NAMES[i].name, &function, NAMES[i].version, flags, &status);
            }
            if (function != NULL)
                return function;
        }
    }
    return dlsym(strcmp(how, "default") == 0 ? RTLD_DEFAULT : driver, symbol);
}

#ifdef LINKED
#define FN(symbol) (&symbol)
#else
#define FN(symbol)                                                            \
    (__extension__({                                                          \
        static _Atomic(uintptr_t) found;                                      \
        uintptr_t function = atomic_load_explicit(&found, memory_order_relaxed); \
        if (function == 0) {                                                  \
            function = (uintptr_t)find(#symbol);                              \
            atomic_store_explicit(&found, function, memory_order_relaxed);    \
        }                                                                     \
        if (function == 0) {                                                  \
            printf("%s missing\n", #symbol);                                  \
            exit(3);                                                          \
        }                                                                     \
        (__typeof__(&symbol))function;                                        \
    }))
#endif

#define MADE 4096
static uint64_t made[MADE];
static int made_count;
static CUcontext context;
static CUstream stream;

static uint64_t keep(CUresult result, uint64_t handle) {
    if (result == CUDA_SUCCESS && made_count < MADE)
        made[made_count++] = handle;
    return handle;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static CUfunction kernel(long long us) {
    char name[32];
    void *module;
    CUfunction function;
    snprintf(name, sizeof name, "k%lld", us);
    FN(cuModuleLoadData)(&module, "");
    FN(cuModuleGetFunction)(&function, module, name);
    return function;
}

static CUresult launch(CUfunction f) { return FN(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL); }

/* Keeps the GPU as busy as it may be for a while. */
static CUresult spin(long long us, long long ms, CUgraphExec exec) {
    CUfunction f = kernel(us);
    CUresult result = 0;
    int64_t start = now_ns(), busy = FN(fake_busy_ns)();
    long long launches = 0, per_wait = us >= 5000 ? 1 : 5000 / us;
    while (result == 0 && now_ns() - start < ms * 1000000) {
        result = exec != NULL ? FN(cuGraphLaunch)(exec, stream) : launch(f);
        if (result == 0 && ++launches % per_wait == 0)
            result = FN(cuStreamSynchronize)(stream);
    }
    double wall = (double)(now_ns() - start), worked = (double)(FN(fake_busy_ns)() - busy);
    printf("spin %d %.2f %lld\n", result, worked / wall * 100, launches);
    return result;
}

struct churn { int rounds; size_t bytes; int failed; };

static void *churn(void *argument) {
    struct churn *work = argument;
    FN(cuCtxSetCurrent)(context);
    for (int i = 0; i < work->rounds; i++) {
        CUdeviceptr pointer;
        CUresult result = FN(cuMemAlloc_v2)(&pointer, work->bytes);
        if (result == CUDA_SUCCESS)
            result = FN(cuMemFree_v2)(pointer);
        work->failed += result != CUDA_SUCCESS;
    }
    return NULL;
}

static void *kernels(void *argument) {
    struct churn *work = argument;
    FN(cuCtxSetCurrent)(context);
    CUfunction f = kernel(50);
    CUstream mine;
    FN(cuStreamCreate)(&mine, 0);
    for (int i = 0; i < work->rounds; i++)
        work->failed += FN(cuLaunchKernel)(f, 1, 1, 1, 1, 1, 1, 0, mine, NULL, NULL) != CUDA_SUCCESS;
    FN(cuStreamSynchronize)(mine);
    return NULL;
}

static void threads(const char *name, void *(*body)(void *), int count, int rounds, size_t bytes) {
    pthread_t ids[64];
    struct churn work[64];
    int failed = 0;
    for (int i = 0; i < count; i++) {
        work[i] = (struct churn){rounds, bytes, 0};
        pthread_create(&ids[i], NULL, body, &work[i]);
    }
    for (int i = 0; i < count; i++) {
        pthread_join(ids[i], NULL);
        failed += work[i].failed;
    }
    printf("%s 0 %d\n", name, failed);
}

static void family(int count, size_t bytes) {
    int results[2], hold[2], good = 0;
    if (pipe(results) != 0 || pipe(hold) != 0)
        exit(7);
    for (int i = 0; i < count; i++) {
        if (fork() != 0)
            continue;
        CUdeviceptr pointer;
        close(hold[1]);
        CUresult r = FN(cuInit)(0);
        r = r != 0 ? r : FN(cuCtxCreate_v2)(&context, 0, 0);
        r = r != 0 ? r : FN(cuMemAlloc_v2)(&pointer, bytes);
        char answer = (char)r;
        if (write(results[1], &answer, 1) != 1 || read(hold[0], &answer, 1) != 0)
            _exit(8);
        _exit(0);
    }
    for (int i = 0; i < count; i++) {
        char answer = 1;
        if (read(results[0], &answer, 1) != 1)
            break;
        good += answer == 0;
    }
    printf("family 0 %d\n", good);
    close(hold[1]);
    while (wait(NULL) > 0)
        ;
}

/* Nanoseconds for an allocation and its freeing, and for a launch of nothing. */
static void bench(int rounds) {
    CUdeviceptr pointer;
    CUfunction f = kernel(0);
    for (int i = 0; i < rounds / 10; i++) {
        FN(cuMemAlloc_v2)(&pointer, MIB);
        FN(cuMemFree_v2)(pointer);
        launch(f);
    }
    int64_t start = now_ns();
    for (int i = 0; i < rounds; i++) {
        FN(cuMemAlloc_v2)(&pointer, MIB);
        FN(cuMemFree_v2)(pointer);
    }
    int64_t pair = now_ns() - start;
    start = now_ns();
    for (int i = 0; i < rounds; i++)
        launch(f);
    printf("bench 0 %.2f %.2f\n", (double)pair / rounds, (double)(now_ns() - start) / rounds);
}

int main(int count, char **commands) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    how = count > 1 ? commands[1] : "dlsym";
#ifndef LINKED
    driver = dlopen("libcuda.so.1", RTLD_NOW | (strcmp(how, "default") == 0 ? RTLD_GLOBAL : RTLD_LOCAL));
    if (driver == NULL) {
        printf("no driver\n");
        return 2;
    }
#endif
    for (int c = 2; c < count; c++) {
        char name[32] = "";
        unsigned long long a = 0, b = 0, d = 0;
        CUresult r = 0;
        CUdeviceptr pointer = 0;
        size_t x = 0, y = 0;
        sscanf(commands[c], "%31[^:]:%llu:%llu:%llu", name, &a, &b, &d);
#define IS(text) (strcmp(name, text) == 0)
#define H(index) (made[(index) < MADE ? (index) : 0])
#define P(type, index) ((type)(uintptr_t)H(index))
        if (IS("init")) {
            r = FN(cuInit)(0);
        } else if (IS("ctx")) {
            r = FN(cuCtxCreate_v2)(&context, 0, 0);
        } else if (IS("primary")) {
            r = FN(cuDevicePrimaryCtxRetain)(&context, 0);
            if (r == 0)
                FN(cuCtxSetCurrent)(context);
        } else if (IS("ctxdestroy")) {
            r = FN(cuCtxDestroy_v2)(context);
        } else if (IS("release1")) {
            r = FN(cuDevicePrimaryCtxRelease_v2)(0);
        } else if (IS("reset")) {
            r = FN(cuDevicePrimaryCtxReset_v2)(0);
        } else if (IS("alloc")) {
            r = FN(cuMemAlloc_v2)(&pointer, a * MIB);
            keep(r, pointer);
        } else if (IS("bytes")) {
            r = FN(cuMemAlloc_v2)(&pointer, a);
            keep(r, pointer);
        } else if (IS("ancient")) {
            unsigned int old = 0;
            r = FN(cuMemAlloc)(&old, 4096);
        } else if (IS("future")) { /* what a CUDA that we do not know would be given */
            int status;
            CUresult (*alloc)(CUdeviceptr *, size_t, int) = NULL;
            FN(cuGetProcAddress_v2)("cuMemAlloc", (void **)&alloc, 14000, 0, &status);
            r = alloc(&pointer, MIB, 0);
        } else if (IS("fill")) { /* allocations of a MiB until one is refused */
            unsigned long long done = 0;
            while ((r = FN(cuMemAlloc_v2)(&pointer, a * MIB)) == 0)
                done++;
            printf("fill %d %llu\n", r, done);
            continue;
        } else if (IS("managed")) {
            r = FN(cuMemAllocManaged)(&pointer, a * MIB, 1);
            keep(r, pointer);
        } else if (IS("pitch")) {
            r = FN(cuMemAllocPitch_v2)(&pointer, &x, a, b, 4);
            keep(r, pointer);
        } else if (IS("free")) {
            r = FN(cuMemFree_v2)(H(a));
        } else if (IS("badfree")) {
            r = FN(cuMemFree_v2)(12345);
        } else if (IS("async")) {
            r = FN(cuMemAllocAsync)(&pointer, a * MIB, stream);
            keep(r, pointer);
        } else if (IS("asyncptsz")) {
            r = FN(cuMemAllocAsync_ptsz)(&pointer, a * MIB, stream);
            keep(r, pointer);
        } else if (IS("frompool")) {
            r = FN(cuMemAllocFromPoolAsync)(&pointer, b * MIB, P(CUmemoryPool, a), stream);
            keep(r, pointer);
        } else if (IS("freeasync")) {
            r = FN(cuMemFreeAsync)(H(a), stream);
        } else if (IS("pool")) { /* a: location type */
            CUmemPoolProps properties = {.allocType = 1, .location = {(int)a, 0}};
            CUmemoryPool pool = NULL;
            r = FN(cuMemPoolCreate)(&pool, &properties);
            keep(r, (uint64_t)(uintptr_t)pool);
        } else if (IS("poolkeep")) {
            uint64_t all = UINT64_MAX;
            r = FN(cuMemPoolSetAttribute)(P(CUmemoryPool, a), 4, &all);
        } else if (IS("pooltrim")) {
            r = FN(cuMemPoolTrimTo)(P(CUmemoryPool, a), 0);
        } else if (IS("pooldestroy")) {
            r = FN(cuMemPoolDestroy)(P(CUmemoryPool, a));
        } else if (IS("stream")) {
            r = FN(cuStreamCreate)(&stream, 1);
        } else if (IS("sync")) {
            r = FN(cuStreamSynchronize)(stream);
        } else if (IS("ctxsync")) {
            r = FN(cuCtxSynchronize)();
        } else if (IS("create")) { /* size, location type */
            CUmemAllocationProp properties = {.type = 1, .location = {b ? (int)b : 1, 0}};
            CUmemHandle handle = 0;
            r = FN(cuMemCreate)(&handle, a * MIB, &properties, 0);
            keep(r, handle);
        } else if (IS("import")) {
            CUmemHandle handle = 0;
            r = FN(cuMemImportFromShareableHandle)(&handle, NULL, 1);
            keep(r, handle);
        } else if (IS("map")) { /* handle, size */
            FN(cuMemAddressReserve)(&pointer, b * MIB, 0, 0, 0);
            r = FN(cuMemMap)(pointer, b * MIB, 0, H(a), 0);
            keep(r, pointer);
        } else if (IS("mapbeside")) { /* handle, size, address that it goes behind: one range of both */
            r = FN(cuMemMap)(H(d) + b * MIB, b * MIB, 0, H(a), 0);
        } else if (IS("unmap")) {
            r = FN(cuMemUnmap)(H(a), b * MIB);
        } else if (IS("retain")) {
            CUmemHandle handle = 0;
            r = FN(cuMemRetainAllocationHandle)(&handle, P(void *, a));
            keep(r, handle);
        } else if (IS("release")) {
            r = FN(cuMemRelease)(H(a));
        } else if (IS("array")) {
            CUDA_ARRAY_DESCRIPTOR description = {a, b, 0x20, 1};
            CUarray array = NULL;
            r = FN(cuArrayCreate_v2)(&array, &description);
            keep(r, (uint64_t)(uintptr_t)array);
        } else if (IS("array3")) {
            CUDA_ARRAY3D_DESCRIPTOR description = {a, b, d, 0x20, 1, 0};
            CUarray array = NULL;
            r = FN(cuArray3DCreate_v2)(&array, &description);
            keep(r, (uint64_t)(uintptr_t)array);
        } else if (IS("arrayfree")) {
            r = FN(cuArrayDestroy)(P(CUarray, a));
        } else if (IS("mipmap")) {
            CUDA_ARRAY3D_DESCRIPTOR description = {a, b, 0, 0x20, 1, 0};
            CUmipmappedArray array = NULL;
            r = FN(cuMipmappedArrayCreate)(&array, &description, (unsigned)d);
            keep(r, (uint64_t)(uintptr_t)array);
        } else if (IS("mipmapfree")) {
            r = FN(cuMipmappedArrayDestroy)(P(CUmipmappedArray, a));
        } else if (IS("external")) {
            CUDA_EXTERNAL_MEMORY_HANDLE_DESC description = {.type = 1, .size = a * MIB};
            CUexternalMemory memory = NULL;
            r = FN(cuImportExternalMemory)(&memory, &description);
            keep(r, (uint64_t)(uintptr_t)memory);
        } else if (IS("externalfree")) {
            r = FN(cuDestroyExternalMemory)(P(CUexternalMemory, a));
        } else if (IS("host")) {
            void *memory = NULL;
            r = FN(cuMemHostAlloc)(&memory, a * MIB, 0);
            keep(r, (uint64_t)(uintptr_t)memory);
        } else if (IS("allochost")) {
            void *memory = NULL;
            r = FN(cuMemAllocHost_v2)(&memory, a * MIB);
            keep(r, (uint64_t)(uintptr_t)memory);
        } else if (IS("hostfree")) {
            r = FN(cuMemFreeHost)(P(void *, a));
        } else if (IS("register")) {
            r = FN(cuMemHostRegister_v2)((void *)0x1000, a * MIB, 0);
        } else if (IS("unregister")) {
            r = FN(cuMemHostUnregister)((void *)0x1000);
        } else if (IS("info")) {
            r = FN(cuMemGetInfo_v2)(&x, &y);
            printf("info %d %.2f %.2f\n", r, (double)x / (double)MIB, (double)y / (double)MIB);
            continue;
        } else if (IS("total")) {
            r = FN(cuDeviceTotalMem_v2)(&x, 0);
            printf("total %d %.2f\n", r, (double)x / (double)MIB);
            continue;
        } else if (IS("truth")) {
            printf("truth 0 %.2f\n", (double)FN(fake_memory_used)() / (double)MIB);
            continue;
        } else if (IS("graph")) {
            CUgraph graph = NULL;
            r = FN(cuGraphCreate)(&graph, 0);
            keep(r, (uint64_t)(uintptr_t)graph);
        } else if (IS("galloc")) { /* graph, size, version of the entry point: 0 is the one of its own */
            CUgraphNode node;
            CUDA_MEM_ALLOC_NODE_PARAMS p = {.poolProps = {.location = {1, 0}}, .bytesize = b * MIB};
            CUgraphNodeParams any = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .u.alloc = p};
            if (d == 0)
                r = FN(cuGraphAddMemAllocNode)(&node, P(CUgraph, a), NULL, 0, &p);
            else if (d == 1)
                r = FN(cuGraphAddNode)(&node, P(CUgraph, a), NULL, 0, &any);
            else if (d == 2)
                r = FN(cuGraphAddNode_v2)(&node, P(CUgraph, a), NULL, NULL, 0, &any);
            else
                r = FN(cuGraphAddNode_v3)(&node, P(CUgraph, a), NULL, NULL, 0, &any);
            keep(r, d == 0 ? p.dptr : any.u.alloc.dptr);
        } else if (IS("gfree")) {
            CUgraphNode node;
            r = FN(cuGraphAddMemFreeNode)(&node, P(CUgraph, a), NULL, 0, H(b));
        } else if (IS("gdestroy")) {
            r = FN(cuGraphDestroy)(P(CUgraph, a));
        } else if (IS("inst")) { /* graph, which entry point */
            CUgraphExec exec = NULL;
            if (b == 0)
                r = FN(cuGraphInstantiateWithFlags)(&exec, P(CUgraph, a), 0);
            else if (b == 1)
                r = FN(cuGraphInstantiate_v2)(&exec, P(CUgraph, a), NULL, NULL, 0);
            else
                r = FN(cuGraphInstantiateWithParams)(&exec, P(CUgraph, a), NULL);
            keep(r, (uint64_t)(uintptr_t)exec);
        } else if (IS("glaunch")) {
            r = FN(cuGraphLaunch)(P(CUgraphExec, a), stream);
        } else if (IS("xdestroy")) {
            r = FN(cuGraphExecDestroy)(P(CUgraphExec, a));
        } else if (IS("gtrim")) {
            r = FN(cuDeviceGraphMemTrim)(0);
        } else if (IS("capture")) { /* mode */
            r = FN(cuStreamBeginCapture_v2)(stream, (int)a);
        } else if (IS("endcapture")) {
            CUgraph graph = NULL;
            r = FN(cuStreamEndCapture)(stream, &graph);
            keep(r, (uint64_t)(uintptr_t)graph);
        } else if (IS("nodes")) {
            r = FN(cuGraphGetNodes)(P(CUgraph, a), NULL, &x);
            printf("nodes %d %zu\n", r, x);
            continue;
        } else if (IS("kernel")) { /* microseconds, how many */
            CUfunction f = kernel((long long)a);
            for (unsigned long long i = 0; i < (b ? b : 1) && r == 0; i++)
                r = launch(f);
        } else if (IS("kernelex")) {
            CUlaunchConfig config = {1, 1, 1, 1, 1, 1, 0, stream, NULL, 0};
            r = FN(cuLaunchKernelEx)(&config, kernel((long long)a), NULL, NULL);
        } else if (IS("cooperative")) {
            r = FN(cuLaunchCooperativeKernel)(kernel((long long)a), 1, 1, 1, 1, 1, 1, 0, stream, NULL);
        } else if (IS("kernelptsz")) {
            r = FN(cuLaunchKernel_ptsz)(kernel((long long)a), 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        } else if (IS("spin")) { /* microseconds, milliseconds */
            spin((long long)a, (long long)b, NULL);
            continue;
        } else if (IS("spingraph")) { /* microseconds, milliseconds, exec */
            spin((long long)a, (long long)b, P(CUgraphExec, d));
            continue;
        } else if (IS("keepstream")) {
            keep(0, (uint64_t)(uintptr_t)stream);
        } else if (IS("usestream")) {
            stream = P(CUstream, a);
        } else if (IS("family")) { /* processes that each take so much, all alive at once */
            family((int)a, b * MIB);
            continue;
        } else if (IS("nullstream")) {
            stream = NULL;
        } else if (IS("sleep")) {
            struct timespec time = {(time_t)(a / 1000), (long)(a % 1000) * 1000000};
            nanosleep(&time, NULL);
        } else if (IS("churn")) { /* threads, rounds, bytes */
            threads("churn", churn, (int)a, (int)b, d);
            continue;
        } else if (IS("kernels")) { /* threads, rounds */
            threads("kernels", kernels, (int)a, (int)b, 0);
            continue;
        } else if (IS("bench")) {
            bench((int)a);
            continue;
        } else if (IS("wait")) { /* for a line on stdin */
            printf("ready\n");
            if (getchar() == EOF)
                return 4;
            continue;
        } else if (IS("fork")) { /* the child does what follows */
            pid_t child = fork();
            if (child != 0) {
                int status = 0;
                waitpid(child, &status, 0);
                return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
            }
        } else if (IS("twins")) { /* a child does what follows, and then so do we */
            pid_t child = fork();
            int status = 0;
            if (child != 0)
                waitpid(child, &status, 0);
        } else if (IS("user")) {
            r = setgid((gid_t)a) != 0 || setuid((uid_t)a) != 0;
        } else if (IS("exec")) { /* the same process starts over with what follows */
            commands[c] = commands[1];
            commands[c - 1] = commands[0];
            execv("/proc/self/exe", commands + c - 1);
            return 5;
        } else if (IS("die")) {
            raise(SIGKILL);
        } else {
            printf("unknown command %s\n", name);
            return 6;
        }
        printf("%s %d\n", name, r);
    }
    return 0;
}
