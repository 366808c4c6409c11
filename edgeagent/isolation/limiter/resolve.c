/* How programs find the driver's functions, and how the limiter's take their place.
 *
 * Linked programs find ours first, because preloaded libraries come first. dlsym and
 * cuGetProcAddress are answered by the real thing, and then the answer is compared by address with
 * the driver's own exports: if it is one that we replace, ours is given instead. Only where
 * cuGetProcAddress hands out an address that the driver does not export is the replacement chosen by
 * name, version and flags; a newer version of an allocating function, which we cannot know, is then
 * replaced by one that refuses.
 */
#include <dlfcn.h>
#include <string.h>

#include "limiter.h"
#include "hooks.h"

#if defined(__x86_64__)
#define OLDEST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define OLDEST_GLIBC "GLIBC_2.17"
#else
#error "which glibc was the first on this architecture?"
#endif

/* dlsym must tail-call the real one: RTLD_NEXT and namespaces depend on who the caller is. */
#if defined(__has_attribute)
#if __has_attribute(musttail)
#define TAIL_CALL __attribute__((musttail)) return
#endif
#endif
#ifndef TAIL_CALL
#define TAIL_CALL return
#endif
/* No sanitizer in it either: their runtimes call dlsym before they can be called. */
#if defined(__clang__)
#define UNWATCHED __attribute__((no_sanitize("address", "thread", "undefined")))
#define ONLY_TAIL_CALLS UNWATCHED
#else
#define UNWATCHED __attribute__((no_sanitize_address, no_sanitize_thread, no_sanitize_undefined))
#define ONLY_TAIL_CALLS UNWATCHED __attribute__((optimize("O2", "omit-frame-pointer"), no_stack_protector))
#endif

typedef void *dlsym_function(void *handle, const char *name);

enum { PLAIN, PTSZ };
enum { OTHER, ALLOCATES };

static const struct known {
    const char *symbol, *name;
    int version;
    unsigned char stream, effect;
    void *replacement; /* NULL: a helper */
} KNOWN[ENTRY_COUNT] = {
#define ENTRY(symbol, name, version, stream, effect) \
    [ENTRY_##symbol] = {#symbol, name, version, stream, effect, (void *)&symbol},
#define HELPER(symbol) [ENTRY_##symbol] = {#symbol, #symbol, 0, PLAIN, OTHER, NULL},
#include "entry_points.h"
};

static _Atomic(dlsym_function *) real_dlsym;
static struct lock driver_lock;
static _Atomic(void *) driver; /* libcuda.so.1, once a program has loaded it */
static _Atomic(void *) addresses[ENTRY_COUNT];

static UNWATCHED dlsym_function *find_real_dlsym(void) {
    dlsym_function *found = (dlsym_function *)(uintptr_t)dlvsym(RTLD_NEXT, "dlsym", OLDEST_GLIBC);
    atomic_store_explicit(&real_dlsym, found, memory_order_relaxed);
    return found;
}

static dlsym_function *get_real_dlsym(void) {
    dlsym_function *found = atomic_load_explicit(&real_dlsym, memory_order_relaxed);
    return LIKELY(found != NULL) ? found : find_real_dlsym();
}

/* Looks the driver up once it is loaded. Leaves no dlerror behind for the program to find. */
static bool know_driver(void) {
    if (LIKELY(atomic_load_explicit(&driver, memory_order_acquire) != NULL))
        return true;
    lock_take(&driver_lock);
    void *handle = atomic_load_explicit(&driver, memory_order_relaxed);
    if (handle == NULL && (handle = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD)) != NULL) {
        for (int i = 0; i < ENTRY_COUNT; i++)
            atomic_store_explicit(&addresses[i], get_real_dlsym()(handle, KNOWN[i].symbol), memory_order_relaxed);
        atomic_store_explicit(&driver, handle, memory_order_release);
    }
    lock_give(&driver_lock);
    (void)dlerror();
    return handle != NULL;
}

void *driver_entry(enum entry entry) {
    if (UNLIKELY(!know_driver()))
        return NULL;
    return atomic_load_explicit(&addresses[entry], memory_order_relaxed);
}

CUresult driver_lacks(void) {
    return know_driver() ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_NOT_INITIALIZED;
}

/* ---- choosing the replacement ----------------------------------------------------------------- */

static void *by_address(void *address) {
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (KNOWN[i].replacement != NULL &&
            atomic_load_explicit(&addresses[i], memory_order_relaxed) == address)
            return KNOWN[i].replacement;
    return NULL;
}

static CUresult refuse_unknown(void) { return CUDA_ERROR_OUT_OF_MEMORY; }

/* True: the driver exports `name`_v3 or so, at this address, and we do not know it. */
static bool is_unknown_version(const char *name, void *address) {
    char symbol[64];
    size_t length = strlen(name);
    if (length > sizeof symbol - 9)
        return false;
    for (char digit = '2'; digit <= '9'; digit++) {
        memcpy(symbol, name, length);
        memcpy(symbol + length, "_v?", 4);
        symbol[length + 2] = digit;
        void *plain = get_real_dlsym()(driver, symbol);
        memcpy(symbol + length + 3, "_ptsz", 6);
        if (address == plain || address == get_real_dlsym()(driver, symbol))
            return true;
    }
    return false;
}

/* What to give a program that asked cuGetProcAddress for `name` and was to get `address`. */
static void *replace(const char *name, void *address, int version, uint64_t flags) {
    void *replacement = by_address(address);
    if (replacement != NULL)
        return replacement;
    unsigned char stream = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? PTSZ : PLAIN;
    int best = -1, allocates = 0;
    bool has_twin = false;
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (KNOWN[i].replacement != NULL && KNOWN[i].stream == PTSZ && strcmp(KNOWN[i].name, name) == 0)
            has_twin = true;
    for (int i = 0; i < ENTRY_COUNT; i++) {
        const struct known *known = &KNOWN[i];
        if (known->replacement == NULL || strcmp(known->name, name) != 0)
            continue;
        allocates |= known->effect == ALLOCATES;
        if ((!has_twin || known->stream == stream) && known->version <= version &&
            (best < 0 || known->version > KNOWN[best].version))
            best = i;
    }
    if (best < 0)
        return allocates ? (void *)&refuse_unknown : address;
    if (is_unknown_version(name, address)) {
        (void)dlerror();
        return allocates ? (void *)&refuse_unknown : address;
    }
    (void)dlerror();
    atomic_store_explicit(&addresses[best], address, memory_order_relaxed);
    return KNOWN[best].replacement;
}

/* ---- the resolution entry points -------------------------------------------------------------- */

static __attribute__((noinline)) const struct known *replaced_symbol(const char *name) {
    for (int i = 0; i < ENTRY_COUNT; i++)
        if (KNOWN[i].replacement != NULL && strcmp(KNOWN[i].symbol, name) == 0)
            return &KNOWN[i];
    return NULL;
}

/* Out of line, so that dlsym itself keeps no frame and can tail-call. */
static __attribute__((noinline)) void *find_driver_symbol(void *handle, const char *name) {
    bool there = know_driver();
    if (handle == RTLD_DEFAULT || handle == RTLD_NEXT) {
        /* The search would find ours even where there is no driver: search behind us instead. */
        void *next = get_real_dlsym()(RTLD_NEXT, name);
        return next != NULL ? replaced_symbol(name)->replacement : NULL;
    }
    void *found = get_real_dlsym()(handle, name);
    void *replacement = there && found != NULL ? by_address(found) : NULL;
    return replacement != NULL ? replacement : found;
}

EXPORT ONLY_TAIL_CALLS void *dlsym(void *handle, const char *name) {
    if (UNLIKELY(name[0] == 'c' && name[1] == 'u' && replaced_symbol(name) != NULL))
        TAIL_CALL find_driver_symbol(handle, name);
    dlsym_function *real = atomic_load_explicit(&real_dlsym, memory_order_relaxed);
    if (UNLIKELY(real == NULL))
        real = find_real_dlsym();
    TAIL_CALL real(handle, name);
}

EXPORT CUresult cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
    CUresult result = CALL(cuGetProcAddress, name, function, version, flags);
    if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
        *function = replace(name, *function, version, flags);
    return result;
}

EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags,
                                    int *status) {
    CUresult result = CALL(cuGetProcAddress_v2, name, function, version, flags, status);
    if (result == CUDA_SUCCESS && name != NULL && function != NULL && *function != NULL)
        *function = replace(name, *function, version, flags);
    return result;
}

void resolve_reset(void) { atomic_store_explicit(&driver_lock.word, 0, memory_order_relaxed); }
