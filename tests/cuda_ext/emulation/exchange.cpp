// What exchange_bind.cpp does, for pointers.
#include "cuda/exchange/row_wire.h"

using namespace nsmg;

extern "C" {

int pack(const PackRows* rows, const int32_t* place, const int64_t* to, int ranks, int capacity) {
  return pack_launch(*rows, place, to, ranks, capacity, nullptr);
}

int unpack(const float* records, const int64_t* counts, int ranks, int capacity, int views, const UnpackedRows* rows) {
  return unpack_launch(records, counts, ranks, capacity, views, *rows, nullptr);
}

int pack_wire(const PackRows* rows, const int32_t* place, const WireSegments* to, bool slots, uint32_t* wire) {
  return pack_wire_launch(*rows, place, *to, slots, wire, nullptr);
}

int unpack_wire(const uint32_t* wire, const WireSegments* come, const int64_t* counts, bool slots, int views,
                const UnpackedRows* rows) {
  return unpack_wire_launch(wire, *come, counts, slots, views, *rows, nullptr);
}

int keep_rows(const PackRows* rows, const int32_t* place, const UnpackedRows* to, int64_t start, int capacity,
              bool slots) {
  return keep_rows_launch(*rows, place, *to, start, capacity, slots, nullptr);
}

int pack_gradients(const Returned* returned, const float* records, const int64_t* counts, const WireSegments* to,
                   uint32_t* wire) {
  return pack_gradients_launch(*returned, records, counts, *to, wire, nullptr);
}

int collect_wire(const Returned* returned, const int32_t* place, const int64_t* real, const uint32_t* wire,
                 const WireSegments* come, const float* own, int count, float* records) {
  return collect_wire_launch(*returned, place, real, wire, *come, own, count, records, nullptr);
}
}
