#include "preload/next_symbol.h"

#include <elf.h>
#include <link.h>
#include <sys/auxv.h>

#include <cstdint>
#include <cstring>

namespace rsock::preload {
namespace {

constexpr ElfW(Half) kHiddenVersion = 0x8000;  // not the default one of its name
constexpr ElfW(Half) kBaseVersion = 1;  // and 0 is local: a symbol without a version of its own

/// What a look-up needs of an object's dynamic section.
class Object {
 public:
  explicit Object(const link_map& map) noexcept : base_(map.l_addr) {
    for (const ElfW(Dyn)* d = map.l_ld; d != nullptr && d->d_tag != DT_NULL; ++d) {
      switch (d->d_tag) {
        case DT_SYMTAB:
          symbols_ = at<ElfW(Sym)>(d->d_un.d_ptr);
          break;
        case DT_STRTAB:
          strings_ = at<char>(d->d_un.d_ptr);
          break;
        case DT_VERSYM:
          versions_ = at<ElfW(Half)>(d->d_un.d_ptr);
          break;
        case DT_GNU_HASH:
          gnu_hash_ = at<uint32_t>(d->d_un.d_ptr);
          break;
        case DT_HASH:
          sysv_hash_ = at<uint32_t>(d->d_un.d_ptr);
          break;
        default:
          break;
      }
    }
  }

  void* find(const char* name) const noexcept {
    if (symbols_ == nullptr || strings_ == nullptr) return nullptr;
    if (gnu_hash_ != nullptr) return find_by_gnu_hash(name);
    return sysv_hash_ != nullptr ? find_by_sysv_hash(name) : nullptr;
  }

 private:
  /// The loader has relocated the pointers of a dynamic section in place, unless it is read-only
  /// (the vDSO's).
  template <typename T>
  const T* at(ElfW(Addr) pointer) const noexcept {
    return reinterpret_cast<const T*>(pointer < base_ ? pointer + base_ : pointer);
  }

  // The layout of DT_GNU_HASH is documented by its users only: glibc, elf/dl-lookup.c, do_lookup_x.
  void* find_by_gnu_hash(const char* name) const noexcept {
    uint32_t hash = 5381;
    for (const char* c = name; *c != '\0'; ++c) hash = hash * 33 + static_cast<unsigned char>(*c);
    const uint32_t buckets = gnu_hash_[0];
    const uint32_t first = gnu_hash_[1];
    const uint32_t words = gnu_hash_[2];
    const uint32_t shift = gnu_hash_[3];
    if (buckets == 0 || words == 0) return nullptr;
    const auto* bloom = reinterpret_cast<const ElfW(Addr)*>(gnu_hash_ + 4);
    constexpr uint32_t kBits = sizeof(ElfW(Addr)) * 8;
    const ElfW(Addr) mask =
        (ElfW(Addr){1} << (hash % kBits)) | (ElfW(Addr){1} << ((hash >> shift) % kBits));
    if ((bloom[hash / kBits % words] & mask) != mask) return nullptr;
    const auto* bucket = reinterpret_cast<const uint32_t*>(bloom + words);
    const uint32_t* chain = bucket + buckets;
    uint32_t i = bucket[hash % buckets];
    if (i < first) return nullptr;
    for (;; ++i) {
      const uint32_t entry = chain[i - first];
      if ((entry | 1) == (hash | 1)) {
        if (void* found = take(i, name)) return found;
      }
      if ((entry & 1) != 0) return nullptr;
    }
  }

  void* find_by_sysv_hash(const char* name) const noexcept {
    uint32_t hash = 0;
    for (const char* c = name; *c != '\0'; ++c) {
      hash = (hash << 4) + static_cast<unsigned char>(*c);
      hash ^= (hash >> 24) & 0xf0;
      hash &= 0x0fffffff;
    }
    const uint32_t buckets = sysv_hash_[0];
    if (buckets == 0) return nullptr;
    const uint32_t* bucket = sysv_hash_ + 2;
    const uint32_t* chain = bucket + buckets;
    for (uint32_t i = bucket[hash % buckets]; i != STN_UNDEF; i = chain[i]) {
      if (void* found = take(i, name)) return found;
    }
    return nullptr;
  }

  /// The address of symbol i, if it is a function called `name` whose version is the default one:
  /// what dlsym takes (glibc, elf/dl-lookup.c, check_match).
  void* take(uint32_t i, const char* name) const noexcept {
    const ElfW(Sym)& s = symbols_[i];
    const unsigned type = s.st_info & 0xf;
    if (s.st_shndx == SHN_UNDEF || s.st_value == 0 || (s.st_info >> 4) == STB_LOCAL) return nullptr;
    if (type != STT_FUNC && type != STT_NOTYPE && type != STT_GNU_IFUNC) return nullptr;
    if (strcmp(strings_ + s.st_name, name) != 0) return nullptr;
    if (versions_ != nullptr && (versions_[i] & kHiddenVersion) != 0 &&
        (versions_[i] & ~kHiddenVersion) > kBaseVersion) {
      return nullptr;
    }
    const ElfW(Addr) address = base_ + s.st_value;
    if (type != STT_GNU_IFUNC) return reinterpret_cast<void*>(address);
    const auto resolver = reinterpret_cast<ElfW(Addr) (*)(uint64_t)>(address);
    return reinterpret_cast<void*>(resolver(getauxval(AT_HWCAP)));
  }

  ElfW(Addr) base_;
  const ElfW(Sym) * symbols_ = nullptr;
  const char* strings_ = nullptr;
  const ElfW(Half) * versions_ = nullptr;
  const uint32_t* gnu_hash_ = nullptr;
  const uint32_t* sysv_hash_ = nullptr;
};

/// Looks in the objects from `map` on, ours left out, up to libc: what follows libc is another
/// libc's or came by dlopen and may be half built.
void* find_from(const link_map* map, const char* name, bool& met_libc) noexcept {
  for (; map != nullptr && !met_libc; map = map->l_next) {
    if (map->l_ld == _DYNAMIC) continue;  // <link.h>: the name of the section in each object
    const Object object(*map);
    if (void* found = object.find(name)) return found;
    met_libc = object.find("gnu_get_libc_version") != nullptr;
  }
  return nullptr;
}

}  // namespace

void* next_symbol(const char* name) noexcept {
  const link_map* ours = _r_debug.r_map;
  while (ours != nullptr && ours->l_ld != _DYNAMIC) ours = ours->l_next;
  bool met_libc = false;
  if (ours != nullptr) {
    if (void* found = find_from(ours->l_next, name, met_libc)) return found;
  }
  // Not preloaded: libc lies in front of us.
  return met_libc ? nullptr : find_from(_r_debug.r_map, name, met_libc);
}

}  // namespace rsock::preload
