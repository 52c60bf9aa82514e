-- Written by Multiverse from its settings. Install the file again after a change of the settings.
return {
  partition = "{{ slurm.partition }}",
  gate_feature = "{{ slurm.gate_feature }}",
  licence = "{{ slurm.licence }}",
  boost = {{ site.boost }},
  inbox = "{{ slurm.inbox }}",
  job_feature = "{{ job_feature }}",
  sriov_gres = "{{ sriov_gres }}",
  job_design = "{{ job_design }}",
  max_nodes = {{ gate_nodes }},
  max_sockets = {{ gate_sockets }},
  max_disk = {{ max_disk }},
  memory_per_cpu = {{ site.memory_per_cpu }},
  placements = { {% for name in site.placements %}"{{ name }}", {% endfor %}},
  administrators = { {% for uid in administrators %}[{{ uid }}] = true, {% endfor %}},
}
