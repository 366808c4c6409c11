/* A libnvidia-ml.so.1 without a driver: answers come from the file `state` that lies beside the
 * library, events from the append-only file `events`. Grammar and meaning: driver.py, its only writer.
 * Behaviour follows the comments of NVIDIA's public nvml.h; it is no evidence about real drivers.
 *
 * A reading that the state does not give is NOT_SUPPORTED. Handles belong to one nvmlInit: used after
 * Shutdown and Init they answer `stale_code` and the call log marks them.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15, RESET_REQUIRED = 16, VERSION_MISMATCH = 25,
    UNKNOWN = 999
};

typedef unsigned int u32;
typedef unsigned long long u64;

/* ---- structures of nvml.h; their sizes are compared with nvidia-ml-py's by the tests ---- */
typedef struct { u64 total, free, used; } nvmlMemory_t;
typedef struct { u32 version; u64 total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { u32 gpu, memory; } nvmlUtilization_t;
typedef struct {
    char busIdLegacy[16]; u32 domain, bus, device, pciDeviceId, pciSubSystemId; char busId[32];
} nvmlPciInfo_t;
typedef struct { u32 pid; u64 usedGpuMemory; u32 gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;
typedef struct { u32 pid; u64 usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct { u32 pid; u64 timeStamp; u32 smUtil, memUtil, encUtil, decUtil; } nvmlProcessUtilizationSample_t;
typedef struct { void *device; u64 eventType, eventData; u32 gpuInstanceId, computeInstanceId; } nvmlEventData_t;
typedef struct { u32 version; u32 sensorType; int temperature; } nvmlTemperature_t;
typedef struct {
    u32 multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount,
        sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
    u64 memorySizeMB;
} nvmlDeviceAttributes_t;
typedef union { double d; u32 ui; unsigned long ul; u64 ull; long long sll; int si; unsigned short us; } nvmlValue_t;
typedef struct {
    u32 fieldId, scopeId; int64_t timestamp, latencyUsec; u32 valueType, nvmlReturn; nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct { const char *nameSpace; u64 softLimit, hardLimit; } nvmlSetMemoryLimits_v1_t;
typedef struct { const char *nameSpace; u64 softLimit, hardLimit, currentUsed; } nvmlGetMemoryLimits_v1_t;

EXPORT int fake_nvml_sizeof(const char *name) {
#define SIZE(c, python) if (!strcmp(name, #python)) return (int)sizeof(c)
    SIZE(nvmlMemory_t, c_nvmlMemory_t);
    SIZE(nvmlMemory_v2_t, c_nvmlMemory_v2_t);
    SIZE(nvmlUtilization_t, c_nvmlUtilization_t);
    SIZE(nvmlPciInfo_t, nvmlPciInfo_t);
    SIZE(nvmlProcessInfo_t, c_nvmlProcessInfo_v2_t);
    SIZE(nvmlProcessInfo_t, c_nvmlProcessInfo_v3_t);
    SIZE(nvmlProcessUtilizationSample_t, c_nvmlProcessUtilizationSample_t);
    SIZE(nvmlEventData_t, c_nvmlEventData_t);
    SIZE(nvmlTemperature_t, c_nvmlTemperature_v1_t);
    SIZE(nvmlDeviceAttributes_t, c_nvmlDeviceAttributes);
    SIZE(nvmlFieldValue_t, c_nvmlFieldValue_t);
    SIZE(nvmlSetMemoryLimits_v1_t, c_nvmlSetMemoryLimits_v1_t);
    SIZE(nvmlGetMemoryLimits_v1_t, c_nvmlGetMemoryLimits_v1_t);
#undef SIZE
    return -1;
}

/* ---- state ---- */
typedef struct Pair { struct Pair *next; char *key, *value; } Pair;
typedef struct { char uuid[96], parent[96]; u32 gi, ci; Pair *pairs; } Gpu;
typedef struct { char symbol[96], uuid[96]; int code; } Fault; /* code -1: hang */
typedef struct { char uuid[96]; int list; u32 pid; u64 bytes; u32 gi, ci; } Proc;
typedef struct { char uuid[96]; nvmlProcessUtilizationSample_t s; } Sample;
typedef struct { char uuid[96]; u32 link, state; char remote[32]; } Link;
typedef struct { char a[96], b[96]; int level; } Near;
typedef struct { char uuid[96]; u64 bytes; char cgroup[512]; } Used;

#define LIST(type, name) type *name; int n_##name
typedef struct {
    Pair *sys;
    LIST(Gpu, gpus); LIST(Fault, faults); LIST(Proc, procs); LIST(Sample, samples); LIST(Link, links);
    LIST(Near, nears); LIST(Used, useds);
} State;
#define ADD(s, name) (grow((void **)&(s)->name, &(s)->n_##name, sizeof *(s)->name))

typedef struct { char uuid[96]; u32 generation; } Slot; /* what a handle points to */
typedef struct { Slot *slot; u64 mask; } Registered;
typedef struct { u32 generation; int inotify; off_t offset; Registered on[64]; int n; } EventSet;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static State state;
static struct stat state_stat;
static char dir[3072];
static int call_log = -1;
static Slot slots[1024];
static int n_slots;
static int references;
static u32 generation;
static char (*enumerated)[96]; /* GPUs as nvmlInit saw them */
static int n_enumerated;

static void *grow(void **array, int *n, size_t size) {
    if ((*n & (*n - 1)) == 0) *array = realloc(*array, (size_t)(*n ? *n * 2 : 1) * size);
    void *at = (char *)*array + (size_t)(*n)++ * size;
    memset(at, 0, size);
    return at;
}

static void put_pair(Pair **list, const char *key, const char *value) {
    Pair *p = malloc(sizeof *p);
    *p = (Pair){*list, strdup(key), strdup(value)};
    *list = p;
}

static const char *pair(const Pair *p, const char *key) {
    for (; p; p = p->next)
        if (!strcmp(p->key, key)) return p->value;
    return NULL;
}

static long long sys_number(const char *key, long long otherwise) {
    const char *v = pair(state.sys, key);
    return v ? strtoll(v, NULL, 0) : otherwise;
}

static Gpu *gpu_by_uuid(State *s, const char *uuid) {
    for (int i = 0; i < s->n_gpus; i++)
        if (!strcmp(s->gpus[i].uuid, uuid)) return &s->gpus[i];
    return NULL;
}

static void free_pairs(Pair *p) {
    while (p) {
        Pair *next = p->next;
        free(p->key); free(p->value); free(p);
        p = next;
    }
}

static void free_state(State *s) {
    free_pairs(s->sys);
    for (int i = 0; i < s->n_gpus; i++) free_pairs(s->gpus[i].pairs);
    free(s->gpus); free(s->faults); free(s->procs); free(s->samples); free(s->links); free(s->nears);
    free(s->useds);
    memset(s, 0, sizeof *s);
}

static void parse_line(State *s, char *line) {
    char a[96] = "", b[96] = "", c[96] = "";
    int rest = 0;
    if (sscanf(line, "sys %95s %n", a, &rest) == 1 && rest) {
        put_pair(&s->sys, a, line + rest);
    } else if (sscanf(line, "gpu %95s", a) == 1) {
        strcpy(((Gpu *)ADD(s, gpus))->uuid, a);
    } else if (!strncmp(line, "mig ", 4)) {
        Gpu *g = ADD(s, gpus);
        sscanf(line, "mig %95s %95s %u %u", g->parent, g->uuid, &g->gi, &g->ci);
    } else if (sscanf(line, "set %95s %95s %n", a, b, &rest) == 2 && rest) {
        Gpu *g = gpu_by_uuid(s, a);
        if (g) put_pair(&g->pairs, b, line + rest);
    } else if (sscanf(line, "err %95s %95s %95s", a, b, c) == 3) {
        Fault *f = ADD(s, faults);
        strcpy(f->symbol, a); strcpy(f->uuid, b); f->code = atoi(c);
    } else if (sscanf(line, "hang %95s %95s", a, b) == 2) {
        Fault *f = ADD(s, faults);
        strcpy(f->symbol, a); strcpy(f->uuid, b); f->code = -1;
    } else if (!strncmp(line, "proc ", 5)) {
        Proc *p = ADD(s, procs);
        long long bytes = 0;
        sscanf(line, "proc %95s %95s %u %lld %u %u", p->uuid, a, &p->pid, &bytes, &p->gi, &p->ci);
        p->bytes = (u64)bytes;
        p->list = a[0] == 'c' ? 0 : a[0] == 'g' ? 1 : 2;
    } else if (!strncmp(line, "sample ", 7)) {
        Sample *p = ADD(s, samples);
        sscanf(line, "sample %95s %u %llu %u %u %u %u", p->uuid, &p->s.pid, &p->s.timeStamp, &p->s.smUtil,
               &p->s.memUtil, &p->s.encUtil, &p->s.decUtil);
    } else if (!strncmp(line, "link ", 5)) {
        Link *l = ADD(s, links);
        sscanf(line, "link %95s %u %u %31s", l->uuid, &l->link, &l->state, l->remote);
    } else if (!strncmp(line, "near ", 5)) {
        Near *n = ADD(s, nears);
        sscanf(line, "near %95s %95s %d", n->a, n->b, &n->level);
    } else if (!strncmp(line, "used ", 5)) {
        Used *u = ADD(s, useds);
        sscanf(line, "used %95s %llu %511s", u->uuid, &u->bytes, u->cgroup);
    }
}

static void in_dir(char *out, size_t n, const char *name) { snprintf(out, n, "%s/%s", dir, name); }

/* Called with the lock held. */
static void refresh(void) {
    char path[4096];
    struct stat now;
    if (!dir[0]) {
        Dl_info info;
        dladdr((void *)refresh, &info);
        char *real = realpath(info.dli_fname, NULL);
        snprintf(dir, sizeof dir, "%s", real ? real : info.dli_fname);
        free(real);
        char *slash = strrchr(dir, '/');
        if (slash) *slash = 0;
        in_dir(path, sizeof path, "log/calls");
        call_log = open(path, O_WRONLY | O_APPEND | O_CLOEXEC);
    }
    in_dir(path, sizeof path, "state");
    if (stat(path, &now) != 0) return;
    if (now.st_ino == state_stat.st_ino && now.st_mtim.tv_sec == state_stat.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == state_stat.st_mtim.tv_nsec && now.st_size == state_stat.st_size)
        return;
    FILE *f = fopen(path, "re");
    if (!f) return;
    fstat(fileno(f), &state_stat);
    State fresh;
    memset(&fresh, 0, sizeof fresh);
    char *line = NULL;
    size_t room = 0;
    ssize_t n;
    while ((n = getline(&line, &room, f)) > 0) {
        if (line[n - 1] == '\n') line[n - 1] = 0;
        parse_line(&fresh, line);
    }
    free(line);
    fclose(f);
    free_state(&state);
    state = fresh;
}

static void log_call(const char *symbol, const char *uuid, const char *mark) {
    char line[320];
    if (call_log < 0) return;
    int n = snprintf(line, sizeof line, "%s %s%s\n", symbol, uuid, mark);
    if (write(call_log, line, (size_t)n) != n) call_log = -1;
}

static void nap(void) {
    struct timespec t = {0, 3000000};
    nanosleep(&t, NULL);
}

/* The injected answer for a call: 0 none. Hangs until the state says otherwise. */
static int injected(const char *symbol, const char *uuid, const char *parent) {
    for (;;) {
        int code = 0, hang = 0;
        for (int i = 0; i < state.n_faults; i++) {
            Fault *f = &state.faults[i];
            if (strcmp(f->symbol, "*") && strcmp(f->symbol, symbol)) continue;
            if (strcmp(f->uuid, "*") && strcmp(f->uuid, uuid) && strcmp(f->uuid, parent)) continue;
            if (f->code == -1) hang = 1;
            else code = f->code;
        }
        if (!hang) return code;
        pthread_mutex_unlock(&lock);
        nap();
        pthread_mutex_lock(&lock);
        refresh();
    }
}

/* Takes the lock and keeps it. */
static int enter_system(const char *symbol, int needs_init) {
    pthread_mutex_lock(&lock);
    refresh();
    log_call(symbol, "-", "");
    int code = injected(symbol, "-", "-");
    if (needs_init && !references) return UNINITIALIZED;
    return code ? code : needs_init ? (int)sys_number("all", 0) : 0;
}

static int sick(const Gpu *g) {
    if (!g) return GPU_IS_LOST;
    const char *lost = pair(g->pairs, "lost");
    if (lost) return atoi(lost);
    return g->parent[0] ? sick(gpu_by_uuid(&state, g->parent)) : 0;
}

/* Takes the lock and keeps it. */
static int enter(const char *symbol, void *handle, Gpu **gpu) {
    Slot *slot = handle;
    pthread_mutex_lock(&lock);
    refresh();
    *gpu = NULL;
    if (slot < slots || slot >= slots + n_slots) {
        log_call(symbol, "?", "");
        return INVALID_ARGUMENT;
    }
    int stale = slot->generation != generation || !references;
    Gpu *g = gpu_by_uuid(&state, slot->uuid);
    char parent[96];
    snprintf(parent, sizeof parent, "%s", g && g->parent[0] ? g->parent : "-");
    log_call(symbol, slot->uuid, stale ? " stale" : "");
    if (stale) return references ? (int)sys_number("stale_code", UNINITIALIZED) : UNINITIALIZED;
    int code = injected(symbol, slot->uuid, parent);
    if (slot->generation != generation) return UNINITIALIZED;
    if (!code) code = (int)sys_number("all", 0);
    *gpu = gpu_by_uuid(&state, slot->uuid);
    return code ? code : sick(*gpu);
}

static int leave(int rc) {
    pthread_mutex_unlock(&lock);
    return rc;
}

#define ENTER(handle)                                                                                          \
    Gpu *g;                                                                                                    \
    int rc = enter(__func__, handle, &g);                                                                      \
    if (rc) return leave(rc)

static int number(const Gpu *g, const char *key, u64 *out) {
    const char *v = pair(g->pairs, key);
    if (!v) return NOT_SUPPORTED;
    *out = strtoull(v, NULL, 0);
    return OK;
}

static int text(const Gpu *g, const char *key, char *out, u32 n) {
    const char *v = pair(g->pairs, key);
    if (!v) return NOT_SUPPORTED;
    if (strlen(v) >= n) return INSUFFICIENT_SIZE;
    strcpy(out, v);
    return OK;
}

/* Symbols that later drivers added: -DOLD_DRIVER builds a library of the r470 kind without them. */
#ifdef OLD_DRIVER
#define NEWER(name) static __attribute__((unused)) int hidden_##name
#else
#define NEWER(name) EXPORT int name
#endif

/* ---- library ---- */
static int init(const char *symbol) {
    int rc = enter_system(symbol, 0);
    if (!rc) rc = (int)sys_number("init", 0);
    if (!rc) rc = (int)sys_number("all", 0);
    if (rc) return leave(rc);
    if (references++ == 0) {
        generation++;
        free(enumerated);
        enumerated = calloc((size_t)state.n_gpus + 1, sizeof *enumerated);
        n_enumerated = 0;
        for (int i = 0; i < state.n_gpus; i++)
            if (!state.gpus[i].parent[0]) strcpy(enumerated[n_enumerated++], state.gpus[i].uuid);
    }
    return leave(OK);
}

EXPORT int nvmlInit(void) { return init(__func__); }
EXPORT int nvmlInit_v2(void) { return init(__func__); }
EXPORT int nvmlInitWithFlags(u32 flags) { (void)flags; return init(__func__); }

EXPORT int nvmlShutdown(void) {
    int rc = enter_system(__func__, 0);
    if (!references) return leave(UNINITIALIZED);
    references--;
    return leave(rc);
}

EXPORT const char *nvmlErrorString(int code) {
    static char texts[1001][24];
    if (code < 0 || code > 1000) return "Unknown";
    snprintf(texts[code], sizeof texts[code], "fake error %d", code);
    return texts[code];
}

static int sys_text(const char *symbol, int needs_init, const char *key, char *out, u32 n) {
    int rc = enter_system(symbol, needs_init);
    const char *v = pair(state.sys, key);
    if (!rc && !v) rc = NOT_SUPPORTED;
    if (!rc && strlen(v) >= n) rc = INSUFFICIENT_SIZE;
    if (!rc) strcpy(out, v);
    return leave(rc);
}

EXPORT int nvmlSystemGetDriverVersion(char *v, u32 n) { return sys_text(__func__, 1, "driver_version", v, n); }
EXPORT int nvmlSystemGetNVMLVersion(char *v, u32 n) { return sys_text(__func__, 0, "nvml_version", v, n); }

static int cuda_version(const char *symbol, int *out) {
    int rc = enter_system(symbol, 0);
    if (!rc) *out = (int)sys_number("cuda_version", 0);
    return leave(rc);
}
EXPORT int nvmlSystemGetCudaDriverVersion(int *v) { return cuda_version(__func__, v); }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *v) { return cuda_version(__func__, v); }

EXPORT int nvmlSystemGetProcessName(u32 pid, char *name, u32 n) {
    char key[32];
    snprintf(key, sizeof key, "process.%u", pid);
    int rc = sys_text(__func__, 1, key, name, n);
    return rc == NOT_SUPPORTED ? NOT_FOUND : rc;
}

/* ---- enumeration ---- */
static int present(char (*out)[96]) { /* UUIDs in the driver's order; returns how many */
    int n = 0;
    const char *mode = pair(state.sys, "enumerate");
    if (!mode || strcmp(mode, "live")) {
        memcpy(out, enumerated, (size_t)n_enumerated * sizeof *enumerated);
        return n_enumerated;
    }
    for (int i = 0; i < state.n_gpus; i++)
        if (!state.gpus[i].parent[0] && n < 64) strcpy(out[n++], state.gpus[i].uuid);
    return n;
}

static int count(const char *symbol, u32 *out) {
    char uuids[64][96];
    int rc = enter_system(symbol, 1);
    if (!rc) *out = (u32)present(uuids);
    return leave(rc);
}
EXPORT int nvmlDeviceGetCount(u32 *n) { return count(__func__, n); }
EXPORT int nvmlDeviceGetCount_v2(u32 *n) { return count(__func__, n); }

static void *slot_for(const char *uuid) {
    for (int i = 0; i < n_slots; i++)
        if (slots[i].generation == generation && !strcmp(slots[i].uuid, uuid)) return &slots[i];
    if (n_slots == (int)(sizeof slots / sizeof *slots)) abort(); /* a test that leaks sessions */
    Slot *slot = &slots[n_slots++];
    slot->generation = generation;
    strcpy(slot->uuid, uuid);
    return slot;
}

static int look_up(const char *symbol, const char *uuid, void **handle) { /* lock held */
    log_call(symbol, uuid, " lookup");
    Gpu *g = gpu_by_uuid(&state, uuid);
    char parent[96];
    snprintf(parent, sizeof parent, "%s", g && g->parent[0] ? g->parent : "-");
    int rc = injected(symbol, uuid, parent);
    if (!rc) rc = sick(gpu_by_uuid(&state, uuid));
    if (!rc) *handle = slot_for(uuid);
    return rc;
}

static int by_index(const char *symbol, u32 index, void **handle) {
    char uuids[64][96];
    int rc = enter_system(symbol, 1);
    if (rc) return leave(rc);
    if (index >= (u32)present(uuids)) return leave(INVALID_ARGUMENT);
    return leave(look_up(symbol, uuids[index], handle));
}
EXPORT int nvmlDeviceGetHandleByIndex(u32 i, void **h) { return by_index(__func__, i, h); }
EXPORT int nvmlDeviceGetHandleByIndex_v2(u32 i, void **h) { return by_index(__func__, i, h); }

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int rc = enter_system(__func__, 1);
    if (rc) return leave(rc);
    for (int i = 0; i < state.n_gpus; i++)
        if (sick(&state.gpus[i])) return leave(sick(&state.gpus[i])); /* any lost GPU spoils it */
    if (!gpu_by_uuid(&state, uuid)) return leave(NOT_FOUND);
    return leave(look_up(__func__, uuid, handle));
}

static int by_bus(const char *symbol, const char *bus, void **handle) {
    int rc = enter_system(symbol, 1);
    if (rc) return leave(rc);
    for (int i = 0; i < state.n_gpus; i++) {
        const char *v = pair(state.gpus[i].pairs, "bus_id");
        size_t n = strlen(bus);
        if (v && n <= strlen(v) && !strcasecmp(v + strlen(v) - n, bus))
            return leave(look_up(symbol, state.gpus[i].uuid, handle));
    }
    return leave(NOT_FOUND);
}
EXPORT int nvmlDeviceGetHandleByPciBusId(const char *bus, void **h) { return by_bus(__func__, bus, h); }
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **h) { return by_bus(__func__, bus, h); }

EXPORT int nvmlDeviceGetIndex(void *h, u32 *out) {
    char uuids[64][96];
    ENTER(h);
    int n = present(uuids);
    rc = NOT_FOUND;
    for (int i = 0; i < n; i++)
        if (!strcmp(uuids[i], g->uuid)) { *out = (u32)i; rc = OK; }
    return leave(rc);
}

EXPORT int nvmlDeviceGetUUID(void *h, char *out, u32 n) {
    ENTER(h);
    if (strlen(g->uuid) >= n) return leave(INSUFFICIENT_SIZE);
    strcpy(out, g->uuid);
    return leave(OK);
}

/* ---- plain readings: one key of the state each ---- */
#define TEXT(symbol, key)                                                                                      \
    EXPORT int symbol(void *h, char *out, u32 n) { ENTER(h); return leave(text(g, key, out, n)); }
#define NUMBER(symbol, key, type)                                                                              \
    EXPORT int symbol(void *h, type *out) {                                                                    \
        ENTER(h);                                                                                              \
        u64 v = 0;                                                                                             \
        rc = number(g, key, &v);                                                                               \
        if (!rc) *out = (type)v;                                                                               \
        return leave(rc);                                                                                      \
    }
#define PAIR(symbol, key1, key2)                                                                               \
    EXPORT int symbol(void *h, u32 *a, u32 *b) {                                                               \
        ENTER(h);                                                                                              \
        u64 v = 0, w = 0;                                                                                      \
        rc = number(g, key1, &v);                                                                              \
        if (!rc) rc = number(g, key2, &w);                                                                     \
        if (!rc) { *a = (u32)v; *b = (u32)w; }                                                                 \
        return leave(rc);                                                                                      \
    }

TEXT(nvmlDeviceGetName, "name")
TEXT(nvmlDeviceGetSerial, "serial")
TEXT(nvmlDeviceGetVbiosVersion, "vbios")
TEXT(nvmlDeviceGetBoardPartNumber, "board_part_number")
NUMBER(nvmlDeviceGetMinorNumber, "minor", u32)
NUMBER(nvmlDeviceGetBrand, "brand", u32)
NUMBER(nvmlDeviceGetArchitecture, "architecture", u32)
NUMBER(nvmlDeviceGetNumGpuCores, "cuda_cores", u32)
NUMBER(nvmlDeviceGetNumaNodeId, "numa_node", u32)
NUMBER(nvmlDeviceGetBoardId, "board_id", u32)
NUMBER(nvmlDeviceGetMultiGpuBoard, "multi_gpu_board", u32)
NUMBER(nvmlDeviceGetDisplayActive, "display_active", u32)
NUMBER(nvmlDeviceGetDisplayMode, "display_mode", u32)
NUMBER(nvmlDeviceGetPersistenceMode, "persistence_mode", u32)
NUMBER(nvmlDeviceGetPowerUsage, "power_mw", u32)
NUMBER(nvmlDeviceGetPowerManagementLimit, "power_limit_mw", u32)
NUMBER(nvmlDeviceGetPowerManagementDefaultLimit, "power_limit_mw", u32)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw", u32)
NUMBER(nvmlDeviceGetTotalEnergyConsumption, "energy_mj", u64)
NUMBER(nvmlDeviceGetFanSpeed, "fan", u32)
NUMBER(nvmlDeviceGetNumFans, "fans", u32)
NUMBER(nvmlDeviceGetPerformanceState, "pstate", u32)
NUMBER(nvmlDeviceGetPowerState, "pstate", u32)
NUMBER(nvmlDeviceGetCurrentClocksThrottleReasons, "throttle", u64)
NUMBER(nvmlDeviceGetSupportedClocksThrottleReasons, "throttle_supported", u64)
NUMBER(nvmlDeviceGetRetiredPagesPendingStatus, "retired_pages_pending", u32)
NUMBER(nvmlDeviceGetMaxMigDeviceCount, "max_mig", u32)
NUMBER(nvmlDeviceGetSupportedEventTypes, "event_types", u64)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, "pcie_max_gen", u32)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, "pcie_gen", u32)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, "pcie_max_width", u32)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width", u32)
PAIR(nvmlDeviceGetEccMode, "ecc_mode", "ecc_mode_pending")
PAIR(nvmlDeviceGetMigMode, "mig_mode", "mig_mode_pending")
PAIR(nvmlDeviceGetEncoderUtilization, "encoder_util", "util_period_us")
PAIR(nvmlDeviceGetDecoderUtilization, "decoder_util", "util_period_us")

NEWER(nvmlDeviceGetCurrentClocksEventReasons)(void *h, u64 *out) {
    Gpu *g;
    int rc = enter("nvmlDeviceGetCurrentClocksEventReasons", h, &g);
    return leave(rc ? rc : number(g, "throttle", out));
}

EXPORT int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) {
    ENTER(h);
    const char *v = pair(g->pairs, "compute_capability");
    return leave(v && sscanf(v, "%d.%d", major, minor) == 2 ? OK : NOT_SUPPORTED);
}

static int pci(const char *symbol, void *h, nvmlPciInfo_t *out) {
    Gpu *g;
    int rc = enter(symbol, h, &g);
    if (rc) return leave(rc);
    const char *v = pair(g->pairs, "bus_id"); /* 00000000:65:00.0 */
    u32 function;
    memset(out, 0, sizeof *out);
    if (!v || sscanf(v, "%x:%x:%x.%x", &out->domain, &out->bus, &out->device, &function) != 4)
        return leave(NOT_SUPPORTED);
    snprintf(out->busId, sizeof out->busId, "%s", v);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%.15s", v + 4);
    u64 id = 0;
    if (!number(g, "pci_device_id", &id)) out->pciDeviceId = (u32)id;
    return leave(OK);
}
EXPORT int nvmlDeviceGetPciInfo(void *h, nvmlPciInfo_t *out) { return pci(__func__, h, out); }
EXPORT int nvmlDeviceGetPciInfo_v2(void *h, nvmlPciInfo_t *out) { return pci(__func__, h, out); }
EXPORT int nvmlDeviceGetPciInfo_v3(void *h, nvmlPciInfo_t *out) { return pci(__func__, h, out); }

/* memory_used excludes what the driver reserves; the v1 call counts that as used, as drivers do. */
static int memory(const Gpu *g, nvmlMemory_v2_t *m) {
    int rc = number(g, "memory_total", &m->total);
    if (rc) return rc;
    m->reserved = m->used = 0;
    number(g, "memory_reserved", &m->reserved);
    number(g, "memory_used", &m->used);
    u64 taken = m->reserved + m->used;
    m->free = m->total > taken ? m->total - taken : 0;
    return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *h, nvmlMemory_t *out) {
    ENTER(h);
    nvmlMemory_v2_t m;
    rc = memory(g, &m);
    if (!rc) *out = (nvmlMemory_t){m.total, m.free, m.used + m.reserved};
    return leave(rc);
}

NEWER(nvmlDeviceGetMemoryInfo_v2)(void *h, nvmlMemory_v2_t *out) {
    Gpu *g;
    int rc = enter("nvmlDeviceGetMemoryInfo_v2", h, &g);
    if (!rc && out->version != (sizeof *out | 2u << 24)) rc = VERSION_MISMATCH;
    return leave(rc ? rc : memory(g, out));
}

EXPORT int nvmlDeviceGetBAR1MemoryInfo(void *h, nvmlMemory_t *out) {
    ENTER(h);
    rc = number(g, "bar1_total", &out->total);
    out->used = 0;
    out->free = out->total;
    return leave(rc);
}

EXPORT int nvmlDeviceGetUtilizationRates(void *h, nvmlUtilization_t *out) {
    ENTER(h);
    u64 gpu = 0, mem = 0;
    rc = number(g, "util", &gpu);
    number(g, "memory_util", &mem);
    if (!rc) *out = (nvmlUtilization_t){(u32)gpu, (u32)mem};
    return leave(rc);
}

EXPORT int nvmlDeviceGetTemperature(void *h, u32 sensor, u32 *out) {
    ENTER(h);
    u64 v = 0;
    rc = sensor == 0 ? number(g, "temperature", &v) : NOT_SUPPORTED;
    *out = (u32)v;
    return leave(rc);
}

NEWER(nvmlDeviceGetTemperatureV)(void *h, nvmlTemperature_t *out) {
    Gpu *g;
    int rc = enter("nvmlDeviceGetTemperatureV", h, &g);
    u64 v = 0;
    if (!rc && out->version != (sizeof *out | 1u << 24)) rc = VERSION_MISMATCH;
    if (!rc) rc = out->sensorType == 0 ? number(g, "temperature", &v) : NOT_SUPPORTED;
    if (!rc) out->temperature = (int)v;
    return leave(rc);
}

static int keyed(const Gpu *g, const char *prefix, u32 n, u64 *out) {
    char key[64];
    snprintf(key, sizeof key, "%s.%u", prefix, n);
    return number(g, key, out);
}

#define INDEXED(symbol, prefix, type)                                                                          \
    EXPORT int symbol(void *h, u32 which, type *out) {                                                         \
        ENTER(h);                                                                                              \
        u64 v = 0;                                                                                             \
        rc = keyed(g, prefix, which, &v);                                                                      \
        if (!rc) *out = (type)v;                                                                               \
        return leave(rc);                                                                                      \
    }
INDEXED(nvmlDeviceGetTemperatureThreshold, "threshold", u32)
INDEXED(nvmlDeviceGetClockInfo, "clock", u32)
INDEXED(nvmlDeviceGetMaxClockInfo, "max_clock", u32)
INDEXED(nvmlDeviceGetFanSpeed_v2, "fan", u32)

EXPORT int nvmlDeviceGetTotalEccErrors(void *h, u32 type, u32 counter, u64 *out) {
    ENTER(h);
    char key[64];
    snprintf(key, sizeof key, "ecc.%u.%u", type, counter);
    return leave(number(g, key, out));
}

EXPORT int nvmlDeviceGetMemoryErrorCounter(void *h, u32 type, u32 counter, u32 location, u64 *out) {
    ENTER(h);
    char key[64];
    snprintf(key, sizeof key, "ecc.%u.%u.%u", type, counter, location);
    return leave(number(g, key, out));
}

EXPORT int nvmlDeviceGetRemappedRows(void *h, u32 *corr, u32 *unc, u32 *pending, u32 *failed) {
    ENTER(h);
    const char *v = pair(g->pairs, "remapped_rows");
    return leave(v && sscanf(v, "%u %u %u %u", corr, unc, pending, failed) == 4 ? OK : NOT_SUPPORTED);
}

EXPORT int nvmlDeviceGetFieldValues(void *h, int n, nvmlFieldValue_t *values) {
    ENTER(h);
    for (int i = 0; i < n; i++) {
        u64 v = 0;
        values[i].valueType = 3; /* unsigned long long */
        values[i].nvmlReturn = (u32)keyed(g, "field", values[i].fieldId, &v);
        values[i].value.ull = v;
    }
    return leave(OK);
}

/* ---- processes ---- */
static int processes(const char *symbol, void *h, int list, u32 *n, void *out, size_t size) {
    Gpu *g;
    int rc = enter(symbol, h, &g);
    if (rc) return leave(rc);
    u64 ignored;
    if (number(g, "process_lists", &ignored)) return leave(NOT_SUPPORTED);
    u32 found = 0, room = *n;
    for (int i = 0; i < state.n_procs; i++) {
        Proc *p = &state.procs[i];
        if (p->list != list) continue;
        if (g->parent[0] ? strcmp(p->uuid, g->parent) || p->gi != g->gi : strcmp(p->uuid, g->uuid)) continue;
        if (found < room && out) {
            nvmlProcessInfo_t full = {p->pid, p->bytes, p->gi, p->ci};
            nvmlProcessInfo_v1_t brief = {p->pid, p->bytes};
            memcpy((char *)out + found * size, size == sizeof full ? (void *)&full : (void *)&brief, size);
        }
        found++;
    }
    *n = found;
    return leave(found > room || (found && !out) ? INSUFFICIENT_SIZE : OK);
}

#define PROCESSES(symbol, list)                                                                                \
    EXPORT int symbol(void *h, u32 *n, nvmlProcessInfo_v1_t *o) {                                              \
        return processes(__func__, h, list, n, o, sizeof *o);                                                  \
    }                                                                                                          \
    EXPORT int symbol##_v2(void *h, u32 *n, nvmlProcessInfo_t *o) {                                            \
        return processes(__func__, h, list, n, o, sizeof *o);                                                  \
    }                                                                                                          \
    NEWER(symbol##_v3)(void *h, u32 *n, nvmlProcessInfo_t *o) {                                                \
        return processes(#symbol "_v3", h, list, n, o, sizeof *o);                                             \
    }
PROCESSES(nvmlDeviceGetComputeRunningProcesses, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, 1)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, 2)

EXPORT int nvmlDeviceGetProcessUtilization(void *h, nvmlProcessUtilizationSample_t *out, u32 *n, u64 since) {
    ENTER(h);
    u64 ignored;
    if (number(g, "process_utilization", &ignored)) return leave(NOT_SUPPORTED);
    u32 found = 0, room = *n;
    for (int i = 0; i < state.n_samples; i++) {
        Sample *s = &state.samples[i];
        if (strcmp(s->uuid, g->uuid) || s->s.timeStamp <= since) continue;
        if (out && found < room) out[found] = s->s;
        found++;
    }
    *n = found;
    if (!found) return leave(NOT_FOUND); /* as nvml.h says of an idle GPU */
    return leave(!out || found > room ? INSUFFICIENT_SIZE : OK);
}

/* ---- MIG ---- */
EXPORT int nvmlDeviceGetMigDeviceHandleByIndex(void *h, u32 index, void **out) {
    ENTER(h);
    u64 mode = 0;
    if (number(g, "mig_mode", &mode) || !mode) return leave(NOT_SUPPORTED);
    for (int i = 0; i < state.n_gpus; i++) {
        if (strcmp(state.gpus[i].parent, g->uuid)) continue;
        if (index-- == 0) {
            *out = slot_for(state.gpus[i].uuid);
            return leave(OK);
        }
    }
    return leave(NOT_FOUND);
}

EXPORT int nvmlDeviceIsMigDeviceHandle(void *h, u32 *out) { ENTER(h); *out = g->parent[0] != 0; return leave(OK); }

EXPORT int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *h, void **out) {
    ENTER(h);
    if (!g->parent[0]) return leave(INVALID_ARGUMENT);
    *out = slot_for(g->parent);
    return leave(OK);
}

EXPORT int nvmlDeviceGetGpuInstanceId(void *h, u32 *out) {
    ENTER(h);
    *out = g->gi;
    return leave(g->parent[0] ? OK : NOT_SUPPORTED);
}

EXPORT int nvmlDeviceGetComputeInstanceId(void *h, u32 *out) {
    ENTER(h);
    *out = g->ci;
    return leave(g->parent[0] ? OK : NOT_SUPPORTED);
}

static int attributes(const char *symbol, void *h, nvmlDeviceAttributes_t *out) {
    Gpu *g;
    int rc = enter(symbol, h, &g);
    if (rc) return leave(rc);
    const char *v = pair(g->pairs, "attributes"); /* multiprocessors GI-slices CI-slices MiB */
    memset(out, 0, sizeof *out);
    return leave(v && sscanf(v, "%u %u %u %llu", &out->multiprocessorCount, &out->gpuInstanceSliceCount,
                             &out->computeInstanceSliceCount, &out->memorySizeMB) == 4 ? OK : NOT_SUPPORTED);
}
EXPORT int nvmlDeviceGetAttributes(void *h, nvmlDeviceAttributes_t *o) { return attributes(__func__, h, o); }
EXPORT int nvmlDeviceGetAttributes_v2(void *h, nvmlDeviceAttributes_t *o) { return attributes(__func__, h, o); }

/* ---- topology ---- */
EXPORT int nvmlDeviceGetTopologyCommonAncestor(void *h, void *other, u32 *out) {
    ENTER(h);
    Slot *o = other;
    if (o < slots || o >= slots + n_slots) return leave(INVALID_ARGUMENT);
    for (int i = 0; i < state.n_nears; i++) {
        Near *n = &state.nears[i];
        if ((!strcmp(n->a, g->uuid) && !strcmp(n->b, o->uuid)) ||
            (!strcmp(n->b, g->uuid) && !strcmp(n->a, o->uuid))) {
            *out = (u32)n->level;
            return leave(OK);
        }
    }
    return leave(NOT_SUPPORTED);
}

static Link *find_link(const Gpu *g, u32 link) {
    for (int i = 0; i < state.n_links; i++)
        if (!strcmp(state.links[i].uuid, g->uuid) && state.links[i].link == link) return &state.links[i];
    return NULL;
}

EXPORT int nvmlDeviceGetNvLinkState(void *h, u32 link, u32 *out) {
    ENTER(h);
    Link *l = find_link(g, link);
    if (l) *out = l->state;
    return leave(l ? OK : NOT_SUPPORTED);
}

EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *h, u32 link, nvmlPciInfo_t *out) {
    ENTER(h);
    Link *l = find_link(g, link);
    u32 function;
    memset(out, 0, sizeof *out);
    if (!l || sscanf(l->remote, "%x:%x:%x.%x", &out->domain, &out->bus, &out->device, &function) != 4)
        return leave(NOT_SUPPORTED);
    snprintf(out->busId, sizeof out->busId, "%s", l->remote);
    return leave(OK);
}

/* ---- events ---- */
EXPORT int nvmlEventSetCreate(void **out) {
    int rc = enter_system(__func__, 1);
    if (rc) return leave(rc);
    char path[4096];
    struct stat now;
    EventSet *set = calloc(1, sizeof *set);
    set->generation = generation;
    set->inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    inotify_add_watch(set->inotify, dir, IN_MODIFY | IN_MOVED_TO | IN_CREATE);
    in_dir(path, sizeof path, "events");
    set->offset = stat(path, &now) == 0 ? now.st_size : 0; /* earlier events are not delivered */
    *out = set;
    return leave(OK);
}

EXPORT int nvmlEventSetFree(void *handle) {
    EventSet *set = handle;
    int rc = enter_system(__func__, 0);
    close(set->inotify);
    free(set);
    return leave(rc);
}

EXPORT int nvmlDeviceRegisterEvents(void *h, u64 types, void *handle) {
    ENTER(h);
    EventSet *set = handle;
    u64 supported = 0;
    rc = number(g, "event_types", &supported);
    if (!rc && (types & ~supported || g->parent[0])) rc = NOT_SUPPORTED;
    if (!rc && set->n == 64) rc = UNKNOWN;
    if (!rc) set->on[set->n++] = (Registered){h, types};
    return leave(rc);
}

/* The next event for the set, from the append-only file: 1 found. */
static int next_event(EventSet *set, nvmlEventData_t *out) {
    char path[4096], line[512], uuid[96];
    in_dir(path, sizeof path, "events");
    FILE *f = fopen(path, "re");
    if (!f) return 0;
    fseeko(f, set->offset, SEEK_SET);
    int found = 0;
    while (!found && fgets(line, sizeof line, f) && strchr(line, '\n')) {
        set->offset = ftello(f);
        nvmlEventData_t e = {0};
        if (sscanf(line, "%95s %llu %llu %u %u", uuid, &e.eventType, &e.eventData, &e.gpuInstanceId,
                   &e.computeInstanceId) != 5)
            continue;
        for (int i = 0; i < set->n && !found; i++) {
            if (strcmp(set->on[i].slot->uuid, uuid) || !(set->on[i].mask & e.eventType)) continue;
            e.device = set->on[i].slot;
            *out = e;
            found = 1;
        }
    }
    fclose(f);
    return found;
}

static int wait_event(const char *symbol, void *handle, nvmlEventData_t *out, u32 timeout_ms) {
    EventSet *set = handle;
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    int rc = enter_system(symbol, 1);
    for (;;) {
        if (!rc && set->generation != generation) rc = UNINITIALIZED;
        for (int i = 0; i < set->n && !rc; i++)
            rc = sick(gpu_by_uuid(&state, set->on[i].slot->uuid)); /* any lost GPU: at once, every time */
        if (rc || next_event(set, out)) return leave(rc);
        clock_gettime(CLOCK_MONOTONIC, &now);
        long long passed = (now.tv_sec - start.tv_sec) * 1000LL + (now.tv_nsec - start.tv_nsec) / 1000000;
        if (passed >= timeout_ms) return leave(TIMEOUT);
        pthread_mutex_unlock(&lock);
        struct pollfd p = {set->inotify, POLLIN, 0};
        char buffer[4096];
        poll(&p, 1, (int)(timeout_ms - passed));
        while (read(set->inotify, buffer, sizeof buffer) > 0) {}
        pthread_mutex_lock(&lock);
        refresh();
        rc = injected(symbol, "-", "-");
        if (!rc) rc = references ? (int)sys_number("all", 0) : UNINITIALIZED;
    }
}
EXPORT int nvmlEventSetWait(void *s, nvmlEventData_t *o, u32 ms) { return wait_event(__func__, s, o, ms); }
EXPORT int nvmlEventSetWait_v2(void *s, nvmlEventData_t *o, u32 ms) { return wait_event(__func__, s, o, ms); }

/* ---- compute mode: the last one set is the last line of the file `modes`; it outlives the process ---- */
EXPORT int nvmlDeviceGetComputeMode(void *h, u32 *out) {
    char path[4096], line[256], uuid[96];
    u64 mode;
    ENTER(h);
    rc = number(g, "compute_mode", &mode);
    in_dir(path, sizeof path, "modes");
    FILE *f = rc ? NULL : fopen(path, "re");
    while (f && fgets(line, sizeof line, f)) {
        u64 set;
        if (sscanf(line, "%95s %llu", uuid, &set) == 2 && !strcmp(uuid, g->uuid)) mode = set;
    }
    if (f) fclose(f);
    if (!rc) *out = (u32)mode;
    return leave(rc);
}

EXPORT int nvmlDeviceSetComputeMode(void *h, u32 mode) {
    char path[4096];
    u64 now;
    ENTER(h);
    rc = number(g, "compute_mode", &now);
    if (!rc && mode > 3) rc = INVALID_ARGUMENT;
    if (rc) return leave(rc);
    in_dir(path, sizeof path, "modes");
    FILE *f = fopen(path, "ae");
    if (!f) return leave(UNKNOWN);
    fprintf(f, "%s %u\n", g->uuid, mode);
    fclose(f);
    return leave(OK);
}

/* ---- memory limits per cgroup (r615): kept in the file `limits`, so they outlive the process ---- */
static int limits_ready(const Gpu *g, const char *cgroup) {
    struct stat now;
    u64 mig = 0;
    if (!sys_number("memory_limits", 0) || pair(g->pairs, "integrated")) return NOT_SUPPORTED;
    if (!number(g, "mig_mode", &mig) && mig) return NOT_SUPPORTED;
    if (!cgroup || stat(cgroup, &now) || !S_ISDIR(now.st_mode)) return INVALID_ARGUMENT;
    return OK;
}

NEWER(nvmlDeviceSetMemoryLimits_v1)(void *h, const nvmlSetMemoryLimits_v1_t *limits) {
    char path[4096];
    Gpu *g;
    int rc = enter("nvmlDeviceSetMemoryLimits_v1", h, &g);
    if (!rc) rc = limits_ready(g, limits->nameSpace);
    if (!rc && limits->softLimit > limits->hardLimit) rc = INVALID_ARGUMENT;
    if (rc) return leave(rc);
    in_dir(path, sizeof path, "limits");
    FILE *f = fopen(path, "ae");
    if (!f) return leave(UNKNOWN);
    fprintf(f, "%s %llu %llu %s\n", g->uuid, limits->softLimit, limits->hardLimit, limits->nameSpace);
    fclose(f);
    return leave(OK);
}

NEWER(nvmlDeviceGetMemoryLimits_v1)(void *h, nvmlGetMemoryLimits_v1_t *out) {
    char path[4096], line[1024], uuid[96], cgroup[512];
    u64 soft, hard;
    Gpu *g;
    int rc = enter("nvmlDeviceGetMemoryLimits_v1", h, &g);
    if (!rc) rc = limits_ready(g, out->nameSpace);
    if (rc) return leave(rc);
    out->softLimit = 0;
    out->hardLimit = ~0ULL;
    out->currentUsed = 0;
    in_dir(path, sizeof path, "limits");
    FILE *f = fopen(path, "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "%95s %llu %llu %511s", uuid, &soft, &hard, cgroup) == 4 && !strcmp(uuid, g->uuid) &&
            !strcmp(cgroup, out->nameSpace)) {
            out->softLimit = soft;
            out->hardLimit = hard;
        }
    if (f) fclose(f);
    for (int i = 0; i < state.n_useds; i++)
        if (!strcmp(state.useds[i].uuid, g->uuid) && !strcmp(state.useds[i].cgroup, out->nameSpace))
            out->currentUsed = state.useds[i].bytes;
    return leave(OK);
}

/* ---- every other export that nvidia-ml-py looks up: generated by build.py ---- */
#define STUB(symbol)                                                                                           \
    EXPORT int symbol(void) {                                                                                  \
        int rc = enter_system(#symbol, 1);                                                                     \
        return leave(rc ? rc : NOT_SUPPORTED);                                                                 \
    }
#include "stubs.h"
