// What a compiled library says of itself: from which sources, for which torch and which GPUs it was compiled. The build
// gives NSMG_BUILD_INFO, "<mark> source=<key> torch=<version> architectures=<list>;" and reads it from the file before
// it loads a library that it did not compile itself (cuda_ext/build/cuda.py).

#define NSMG_EXPORT extern "C" __attribute__((visibility("default")))

NSMG_EXPORT const char* nsmg_source_key() { return NSMG_BUILD_INFO; }
