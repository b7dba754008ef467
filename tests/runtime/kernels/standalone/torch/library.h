// Nothing is registered: the functions are called by their names.

#pragma once

struct Library {
  template <typename... Arguments>
  void def(const Arguments&...) {}
  template <typename... Arguments>
  void impl(const Arguments&...) {}
};

#define JOIN_NAMES(a, b) a##b
#define NAMED(number, library) [[maybe_unused]] static void JOIN_NAMES(register_, number)(Library & library)
#define TORCH_LIBRARY_FRAGMENT(name, library) NAMED(__COUNTER__, library)
#define TORCH_LIBRARY_IMPL(name, key, library) NAMED(__COUNTER__, library)
