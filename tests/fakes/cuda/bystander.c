/* A program that has nothing to do with CUDA, linked to neighbour.c's library. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

int main(int count, char **arguments) {
    printf("%d %s %s\n", atoi(count > 1 ? arguments[1] : "7"),
           dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") == NULL ? "no-cuda" : "cuda",
           dlsym(RTLD_DEFAULT, "printf") != NULL ? "printf" : "no-printf");
    return 0;
}
