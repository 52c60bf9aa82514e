-- Makes the two functions of job_submit.lua call Multiverse's after the site's own. The site's rules come first, and hold
-- for all partitions. Multiverse's part changes only jobs of its own partitions.
if multiverse_is_called then return end -- the lines that load this file may be there twice
multiverse_is_called = true

local _, multiverse = pcall(dofile, "{{ directory }}/multiverse.lua")
if type(multiverse) ~= "table" then
  -- Without multiverse.lua no job is sent to the gate, and none with a VM inside is kept from nodes that cannot have it.
  -- Jobs of Multiverse's partitions are refused, and those that ask for a VM inside. All others are accepted.
  slurm.log_error("multiverse: %s", tostring(multiverse))
  local administrators = { {% for uid in administrators %}[{{ uid }}] = true, {% endfor %}}

  local function refuse()
    slurm.log_user("%s", "{{ failed }}")
    return 2090 -- ESLURM_INTERNAL: Slurm internal error, contact system administrator
  end

  local function answer(names)
    for name in string.gmatch(names, "[^,]+") do
      if name == "{{ slurm.partition }}" then return refuse() end
    end
    return slurm.SUCCESS
  end

  local function has_vm_inside(job)
    for _, entry in pairs(type(job.spank_job_env) == "table" and job.spank_job_env or {}) do
      if string.find(entry, "_SLURM_SPANK_OPTION_multiverse_", 1, true) then return true end
    end
    return string.find(" " .. (job.comment or ""), "%svm:[^%s]") ~= nil
  end

  multiverse = {}

  function multiverse.submit(job, partitions, uid)
    if has_vm_inside(job) then return refuse() end
    for name, partition in pairs(partitions or {}) do
      if not job.partition and partition.flag_default == 1 then return answer(name) end
    end
    return answer(job.partition or "")
  end

  function multiverse.modify(job, record, partitions, uid)
    if administrators[uid] then return slurm.SUCCESS end
    return answer((record.partition or "") .. "," .. (job.partition or ""))
  end
end

-- A function that calls the site's own function and then ours. An error of the site's own is Slurm's to handle, as it was
-- without us, unless we refuse the job.
local function after(own, ours)
  if type(own) ~= "function" then return ours end
  return function(...)
    local fine, code = pcall(own, ...)
    if fine and type(code) == "number" and code ~= slurm.SUCCESS then return code end
    local answer = ours(...)
    if not fine and answer == slurm.SUCCESS then error(code, 0) end
    return answer
  end
end

slurm_job_submit = after(slurm_job_submit, multiverse.submit)
slurm_job_modify = after(slurm_job_modify, multiverse.modify)
