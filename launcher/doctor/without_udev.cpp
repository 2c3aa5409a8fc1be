// The functions of libudev that a static hwloc needs. hwloc uses them to examine disks, which
// hvdrun does not need, and continues without udev if udev_new() returns a null pointer.

extern "C" {

void* udev_new() { return nullptr; }
void* udev_unref(void* /*udev*/) { return nullptr; }
void* udev_device_new_from_subsystem_sysname(void* /*udev*/, const char* /*subsystem*/,
                                             const char* /*name*/) {
  return nullptr;
}
const char* udev_device_get_property_value(void* /*device*/, const char* /*key*/) {
  return nullptr;
}
void* udev_device_unref(void* /*device*/) { return nullptr; }
}
