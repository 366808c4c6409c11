/* A library as others are: it wraps atoi and finds the next one with RTLD_NEXT. */
#include <dlfcn.h>

int atoi(const char *text) {
    int (*next)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "atoi");
    return next(text) + 1000;
}
