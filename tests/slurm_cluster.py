"""A Slurm cluster of this one machine, for tests. Needs root and the packages slurm-wlm and munge."""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

FOLDERS = {
    "/etc/slurm": "root", "/var/spool/slurmctld": "root", "/var/spool/slurmd": "root", "/var/log/slurm": "root",
    "/etc/munge": "munge", "/run/munge": "munge", "/var/log/munge": "munge", "/var/lib/munge": "munge",
}  # fmt: skip
CONFIG = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/spool/slurmd
StateSaveLocation=/var/spool/slurmctld
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobRequeue=1
KillWait=20
MpiDefault=none
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


def reason_against() -> str:
    """Why no cluster can be started here, or "" if one can."""
    if answers():
        return ""
    if os.geteuid() != 0:
        return "starting Slurm needs root"
    missing = [name for name in ("munged", "slurmctld", "slurmd", "squeue") if not shutil.which(name)]
    if missing:
        return f"Slurm is not installed ({', '.join(missing)} missing): apt-get install slurm-wlm munge"
    return ""


def start() -> None:
    """Start the daemons unless a cluster answers already."""
    if answers():
        return
    for folder, owner in FOLDERS.items():
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.chown(folder, owner, owner)
    key = Path("/etc/munge/munge.key")
    if not key.exists():
        key.write_bytes(os.urandom(1024))
    shutil.chown(key, "munge", "munge")
    key.chmod(0o400)
    Path("/run/munge").chmod(0o755)
    Path("/etc/slurm/slurm.conf").write_text(CONFIG.format(host=socket.gethostname().split(".")[0], cpus=cores()))
    for command in (["runuser", "-u", "munge", "--", "munged"], ["slurmctld"], ["slurmd"]):
        subprocess.run(command, check=True, timeout=60)
    deadline = time.monotonic() + 60
    while not answers():
        assert time.monotonic() < deadline, "Slurm did not come up within a minute; see /var/log/slurm"
        time.sleep(1)


def answers() -> bool:
    """Whether a controller answers and has a node."""
    if not shutil.which("sinfo"):
        return False
    result = subprocess.run(["sinfo", "--noheader", "--format=%T"], capture_output=True, text=True)
    return result.returncode == 0 and bool(result.stdout.strip())


def cores() -> int:
    """Cores of this machine."""
    return os.cpu_count() or 1
