/* A library as others are: it wraps getpagesize and finds the next one with RTLD_NEXT. */
#include <dlfcn.h>
#include <unistd.h>

int getpagesize(void) {
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "getpagesize");
    return next() + 1;
}
