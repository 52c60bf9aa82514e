-- Written by Multiverse from its settings; `multiverse` writes it anew when they change.
return {
  gate_partition = "vm",
  run_partition = "vmrun",
  gate_feature = "mvgate",
  inbox = "/run/multiverse/inbox",
  max_cpus = 2,
  max_memory = 3760,
  max_disk = 12288,
  total_cpus = 2,
  total_memory = 3840,
  reserve = 80,
  memory_per_cpu = 150,
  administrators = { [0] = true, [64] = true, },
}
