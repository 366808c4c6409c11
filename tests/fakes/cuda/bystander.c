/* A program that has nothing to do with CUDA, linked to neighbour.c's library. */
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

int main(void) {
    printf("%d %s %s\n", getpagesize(), dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL ? "no-cuda" : "cuda",
           dlsym(RTLD_DEFAULT, "printf") != NULL ? "printf" : "no-printf");
    return 0;
}
