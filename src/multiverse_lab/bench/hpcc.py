"""HPCC, the HPC Challenge: its input for two ranks, and the figures in its summary."""

from __future__ import annotations

import re
from collections.abc import Mapping

PACKAGE = "hpcc"

# In the order of lines that it expects: one small HPL problem on a process grid of 1 × 2.
HPCC_INPUT = """HPLinpack benchmark input file
Multiverse demo
HPL.out      output file name (if any)
6            device out (6=stdout,7=stderr,file)
1            # of problems sizes (N)
480          Ns
1            # of NBs
48           NBs
0            PMAP process mapping (0=Row-,1=Column-major)
1            # of process grids (P x Q)
1            Ps
2            Qs
16.0         threshold
1            # of panel fact
2            PFACTs (0=left, 1=Crout, 2=Right)
1            # of recursive stopping criterium
4            NBMINs (>= 1)
1            # of panels in recursion
2            NDIVs
1            # of recursive panel fact.
1            RFACTs (0=left, 1=Crout, 2=Right)
1            # of broadcast
1            BCASTs (0=1rg,1=1rM,2=2rg,3=2rM,4=Lng,5=LnM)
1            # of lookahead depth
1            DEPTHs (>=0)
2            SWAP (0=bin-exch,1=long,2=mix)
64           swapping threshold
0            L1 in (0=transposed,1=no-transposed) form
0            U  in (0=transposed,1=no-transposed) form
1            Equilibration (0=no,1=yes)
8            memory alignment in double (> 0)
##### This line (no. 32) is ignored (it serves as a separator). ######
0            Number of additional problem sizes for PTRANS
1200         values of N
0            number of additional blocking sizes for PTRANS
40           values of NB
"""


def hpcc_figures(summary: str) -> Mapping[str, str]:
    """The figures in the text of hpccoutf.txt, by name; nothing unless HPL found its own result correct."""
    found = dict(re.findall(r"^(\w+)=(\S+)$", summary, re.MULTILINE))
    return found if "HPL_Tflops" in found and found.get("Success") == "1" else {}
