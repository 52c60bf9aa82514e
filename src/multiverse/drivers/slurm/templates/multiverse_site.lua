-- Written by Multiverse from its settings; `multiverse` writes it anew when they change.
return {
  gate_partition = "{{ gate_partition }}",
  run_partition = "{{ run_partition }}",
  gate_feature = "{{ gate_feature }}",
  inbox = "{{ inbox }}",
  max_cpus = {{ max_cpus }},
  max_memory = {{ max_memory }},
  max_disk = {{ max_disk }},
  total_cpus = {{ total_cpus }},
  total_memory = {{ total_memory }},
  reserve = {{ reserve }},
  memory_per_cpu = {{ memory_per_cpu }},
  administrators = { {% for uid in administrators %}[{{ uid }}] = true, {% endfor %}},
}
