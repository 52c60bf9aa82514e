-- Written by Multiverse from its settings. Install the file again after a change of the settings.
return {
  partition = "{{ partition }}",
  gate_feature = "{{ gate_feature }}",
  licence = "{{ licence }}",
  boost = {{ boost }},
  inbox = "{{ inbox }}",
  job_feature = "{{ job_feature }}",
  sriov_gres = "{{ sriov_gres }}",
  job_design = "{{ job_design }}",
  max_nodes = {{ gate_nodes }},
  max_sockets = {{ gate_sockets }},
  max_disk = {{ max_disk }},
  memory_per_cpu = {{ memory_per_cpu }},
  placements = { {% for name in placements %}"{{ name }}", {% endfor %}},
  administrators = { {% for uid in administrators %}[{{ uid }}] = true, {% endfor %}},
}
