"""Hosts without Slurm: a real sshd on each of three loopback addresses, and a stand-in for ssh where none is needed."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from drover.launch import hosts as hosts_module
from drover.launch import on_host
from drover.launch.hosts import Found, hosts_place, look_at
from drover.launch.on_host import Work, answers, line_of
from drover.launch.plan import Options, plan
from drover.launch.slurm.control import cancel
from drover.launch.slurm.nodes import add_strike
from drover.pipeline.config.launching import LaunchConfig
from drover.pipeline.config.loading import load_config
from drover.pipeline.contract.run import Run
from drover.pipeline.contract.state import CANCEL, read_attempts
from tests.conftest import REPOSITORY, environment
from tests.faulty import HOOKS
from tests.refusal import table
from tests.stages.training import curve, difference, proven, reusing, run_stage
from tests.waiting import HANG_S, wait_for

ADDRESSES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
SSHD_CONFIG = """\
Port {port}
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PidFile none
"""
SSH_CONFIG = """\
Host *
    Port {port}
    IdentityFile {folder}/key
    IdentitiesOnly yes
    User {user}
    UserKnownHostsFile {folder}/known
"""
SSH = """\
# In place of ssh: it runs the command here, unless a file says what is wrong with the host.
for word; do host=$command; command=$word; done
[ -e "$0.$host" ] && { cat "$0.$host" >&2; exit 255; }
exec sh -c "$command"
"""


# ---- a real sshd


class Hosts:
    """Three machines that are one: each has an sshd at an address of its own."""

    def __init__(self, folder, sshd):
        self.folder, self.sshd, self.servers = folder, sshd, {}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
        key = " ".join((folder / "key.pub").read_text().split()[:2])
        (folder / "known").write_text("".join(f"[{address}]:{self.port} {key}\n" for address in ADDRESSES))
        (folder / "ssh_config").write_text(SSH_CONFIG.format(port=self.port, folder=folder, user=getpass.getuser()))
        self.ssh = f"launch.ssh=[ssh, -F, {folder}/ssh_config]"
        for address in ADDRESSES:
            self.up(address)

    def up(self, address, **settings):
        """Let a machine answer. settings: of its sshd; the first one counts."""
        own = "".join(f"{name} {value}\n" for name, value in settings.items())
        (self.folder / address).write_text(own + SSHD_CONFIG.format(port=self.port, address=address,
                                                                    folder=self.folder))
        with open(self.folder / f"{address}.log", "wb") as log:
            server = self.servers[address] = psutil.Popen(
                [self.sshd, "-D", "-e", "-f", str(self.folder / address)], stdout=log, stderr=log)
        wait_for(lambda: b"listening" in (self.folder / f"{address}.log").read_bytes(), of=server)

    def kill(self, address):
        """Let a machine lose power: its server goes, and everything that was started through it."""
        server = self.servers.pop(address)
        for process in [server, *server.children(recursive=True)]:
            with suppress(psutil.Error):
                process.kill()
        server.wait()

    def close(self):
        for address in [*self.servers]:
            self.kill(address)


@pytest.fixture
def hosts(tmp_path):
    """The machines; left out where there is no sshd."""
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if sshd is None or shutil.which("ssh") is None:
        pytest.skip("there is no sshd: the Debian package openssh-server has one")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # which Debian's service makes when it starts
    folder = tmp_path / "machines"
    folder.mkdir()
    hosts = Hosts(folder, sshd)
    yield hosts
    hosts.close()


@pytest.mark.slow
def test_three_hosts_lose_one_and_take_it_back(hosts, tmp_path, encoded):
    """A machine is lost while rank 0 waits at a step. Training goes on without it, and with it once it is back."""
    config = reusing(encoded, tmp_path, train={
        "steps": 24, "micro_batch": 2, "batch_tokens": 3072, "precision": "fp64", "hooks": HOOKS,
        "checkpoint": {"every_steps": 4}})
    run_stage("train", config, "name=whole")
    run, secret, told = tmp_path / "runs/mini", "never-on-a-command-line", tmp_path / "told"
    with open(told, "w") as said:
        launcher = subprocess.Popen(
            [sys.executable, "launch/submit.py", "--cluster", "hosts", "--hosts", ",".join(ADDRESSES), "--stage",
             "train", "--config", str(config), hosts.ssh, "launch.train.min_nodes=2", "launch.processes=1",
             "launch.cpus=1", "launch.secrets=[TRIAL_WORD]",
             "launch.environment.DROVER_FAULTS=wait:rank=0,step=10; wait:rank=0,step=18"],
            cwd=REPOSITORY, env={**environment(), "TRIAL_WORD": secret}, stdout=said, stderr=said)
    try:
        wait_for((run / "train/faults/wait-rank0-step10").exists, told.read_text, of=launcher)
        lines = [line for process in psutil.process_iter(["cmdline"]) for line in process.info["cmdline"] or ()]
        assert any("drover.launch.on_host" in line for line in lines) and not any(secret in line for line in lines)
        ranks = [process for server in hosts.servers.values() for process in server.children(recursive=True)
                 if "drover.pipeline.train" in process.cmdline()]
        assert [process.environ()["TRIAL_WORD"] for process in ranks] == [secret] * 3
        hosts.kill("127.0.0.2")
        wait_for((run / "train/faults/wait-rank0-step18").exists, told.read_text, of=launcher)
        hosts.up("127.0.0.2")
        assert launcher.wait(HANG_S) == 0, told.read_text()
    finally:
        launcher.kill()
    events = read_attempts(run)
    assert [event["nodes"] for event in events if event["event"] == "attempt"] == [
        [*ADDRESSES], ["127.0.0.1", "127.0.0.3"], [*ADDRESSES]], told.read_text()
    reason = next(event["reason"] for event in events if event["event"] == "ended")
    assert "lost 127.0.0.2 (Connection to 127.0.0.2 closed" in reason
    assert "continues with 2 of 3 hosts (127.0.0.2: ssh: connect to host 127.0.0.2 port" in told.read_text()
    whole = {record["step"]: record for record in curve(config, "whole")}
    assert proven(config) and difference(curve(config), whole) < 1e-9


def test_whoever_does_not_let_us_in_is_named_and_nothing_is_asked(hosts, ready):
    """A machine that is down, one that does not know our key, and one whose key we do not know."""
    hosts.kill("127.0.0.1")
    hosts.kill("127.0.0.2")
    (hosts.folder / "strangers").write_text("")
    hosts.up("127.0.0.2", AuthorizedKeysFile=hosts.folder / "strangers")
    known = (hosts.folder / "known").read_text().splitlines(keepends=True)
    (hosts.folder / "known").write_text("".join(known[:2]))
    refused = ready.submit("--stage", "train", "--cluster", "hosts", "--hosts", ",".join(ADDRESSES), hosts.ssh,
                           "launch.processes=1", "train.batch_tokens=3072", PATH=os.environ["PATH"])
    problem, = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert refused.returncode == 2
    assert problem.startswith("error: 3 of 3 hosts cannot be used. 127.0.0.1: ssh: connect to host 127.0.0.1 port")
    assert f"127.0.0.2: {getpass.getuser()}@127.0.0.2: Permission denied (publickey" in problem
    assert "127.0.0.3: Host key verification failed.; " not in problem and "127.0.0.3: Host key verification" in problem


# ---- ssh is played, and so are the stages


@pytest.fixture
def ssh(programs):
    """A stand-in for ssh."""
    programs.do("ssh", SSH)
    return programs.folder / "ssh"


def begin(ready, ssh, *more, **variables):
    command = ready.command("--config", "config.yaml", "--cluster", "hosts", "--hosts", "127.0.0.1,127.0.0.2",
                            f"launch.ssh=[{ssh}]", "launch.processes=1", "launch.preflight=false", *more)
    return subprocess.Popen(command, cwd=ready.work, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env=ready.environ(**variables))


def go(ready, ssh, *more, expect=0, **variables):
    launcher = begin(ready, ssh, *more, **variables)
    said = launcher.communicate(timeout=HANG_S)[0]
    assert launcher.returncode == expect, said
    return said


def test_ranks_are_spread_and_other_stages_run_on_the_first_host(ready, ssh):
    said = go(ready, ssh, "--stage", "train,convert", "launch.cpus=3")
    assert "train rank 0 of 2 threads 3" in said and "convert rank 0 of -" in said and "rank 1 of 2" not in said
    logs = [(ready.run / "logs/train/latest" / f"node{node}.log").read_text() for node in (0, 1)]
    assert [log.partition(" of ")[0] for log in logs] == ["0: train rank 0", "1: train rank 1"]
    ready.check_secret()


def test_a_killed_rank_is_named_with_its_host(ready, ssh):
    said = go(ready, ssh, "--stage", "train", "launch.max_restarts=1", FAKE_train="killed", expect=137)
    assert "crashed: rank 1 on 127.0.0.2: killed by SIGKILL; starting again" in said and "2 starts in a row" in said
    wait_for(lambda: not ready.alive())


def test_setup_is_a_script_without_input_and_what_a_stage_refuses_is_not_tried_again(ready, ssh):
    """It has a comment, a command of several lines, one that reads all input, and one that fails."""
    setup = "launch.setup=['true # for nothing', 'if true', then, 'cat; export FAKE_train=fail; fi', 'false || true']"
    said = go(ready, ssh, "--stage", "train", setup, expect=2)
    assert "the third record of corpus.txt is broken" in said and "starting again" not in said


def test_a_line_of_the_setup_that_fails_is_named(ready, ssh):
    said = go(ready, ssh, "--stage", "train", "launch.setup=['true', 'nosuch load cuda']", expect=2)
    assert "127.0.0.1: launch.setup failed with exit status 127 (line 2" in said


def test_fewer_hosts_where_that_is_allowed(ready, ssh):
    ssh.with_name("ssh.127.0.0.1").write_text("ssh: connect to host port 22: No route to host\n")
    assert "1 of 2 hosts cannot be used. 127.0.0.1: ssh: connect" in go(ready, ssh, "--stage", "train", expect=2)
    said = go(ready, ssh, "--stage", "train", "launch.train.min_nodes=1")
    assert "continues with 1 of 2 hosts (127.0.0.1: ssh: connect" in said and "train rank 0 of 1" in said


def test_a_host_that_is_lost_is_waited_for(ready, ssh):
    """And the launcher can be asked to end meanwhile."""
    launcher, log = begin(ready, ssh, "--stage", "train", FAKE_train="slow"), ready.run / "logs/local.log"
    ready.wait_for_bodies("train", 2)
    gone = ssh.with_name("ssh.127.0.0.2")
    gone.write_text("ssh: connect to host 127.0.0.2 port 22: No route to host\n")
    rank = int((ready.pids / "train-1").read_text())
    os.kill(psutil.Process(rank).ppid(), signal.SIGKILL)
    wait_for(lambda: "waits for more hosts: 1 of 2 can be used (127.0.0.2: ssh: connect" in log.read_text(),
             log.read_text, of=launcher)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(HANG_S) == 130 and not ready.alive()


def test_a_host_with_other_code_is_not_used(tmp_path, ssh, monkeypatch):
    launch = LaunchConfig(ssh=[str(ssh)], hosts=["here"])
    assert look_at(launch, tmp_path).there
    monkeypatch.setattr(hosts_module, "code_hash", lambda: "other")
    assert "here: has other code of Drover" in str(look_at(launch, tmp_path))


@pytest.mark.parametrize("how", ["cancel", "ctrl-c"])
def test_a_request_to_end_reaches_the_ranks(ready, ssh, how, monkeypatch, capsys):
    launcher = begin(ready, ssh, "--stage", "train,convert", FAKE_train="slow")
    ready.wait_for_bodies("train", 2)
    if how == "cancel":
        assert cancel(ready.run) == 0 and "asked the launcher" in capsys.readouterr().out
    else:
        launcher.send_signal(signal.SIGINT)
    said = launcher.communicate(timeout=HANG_S)[0]
    assert launcher.returncode == 130 and "stopped in train; the same command continues" in said, said
    assert len([*ready.pids.glob("train-?.saved")]) == 2 and not (ready.run / CANCEL).exists()
    assert cancel(ready.run) == 0 and "nothing to cancel" in capsys.readouterr().out


def test_a_second_launcher_of_a_run_is_refused_and_no_rank_outlives_the_first(ready, ssh):
    launcher = begin(ready, ssh, "--stage", "train", FAKE_train="slow")
    ready.wait_for_bodies("train", 2)
    assert "is in use by process" in go(ready, ssh, "--stage", "train", expect=2)
    launcher.kill()
    wait_for(lambda: not ready.alive())


def test_ranks_end_when_the_launcher_is_silent(tmp_path):
    """As where the network is cut: the link is not closed, but nothing comes over it any more."""
    work = Work("convert", (sys.executable, "-c", "import time; time.sleep(3600)"), {}, str(tmp_path / "log"), 0, 0, 0)
    code = "import sys; from drover.launch import on_host; on_host.SILENT_S = 0.5; sys.exit(on_host.main())"
    host = subprocess.Popen([sys.executable, "-c", code], env=environment(), stdin=subprocess.PIPE,
                            stderr=subprocess.PIPE)
    host.stdin.write(line_of(work))
    host.stdin.flush()
    assert host.wait(HANG_S) == 1
    answer, = answers(host.stderr.read().decode())
    assert answer["rank"] == 0
    assert answer["status"] in (128 + signal.SIGTERM, 128 + signal.SIGKILL), "whichever comes first"


# ---- which hosts a start gets


@pytest.mark.parametrize("there, nodes, fewest, struck, taken", table("""
    abcd -> 2 -> null -> '' -> ab
    acd -> 2 -> null -> '' -> ac
    abcd -> 2 -> null -> b -> ac
    abcd -> 4 -> null -> b -> abcd
    abcd -> 4 -> 1 -> b -> ac
    d -> 4 -> 1 -> '' -> d""", str, str, str, yaml.safe_load))
def test_which_hosts_a_start_gets(launcher, monkeypatch, there, nodes, fewest, struck, taken):
    """The others are spare. One that failed twice is left out where others are named; then three ranks of four are
    left, which do not divide the batch."""
    run = Run(load_config("config.yaml", [f"launch.train.nodes={nodes}", "launch.hosts=[a,b,c,d]",
                                          f"launch.train.min_nodes={fewest}", "launch.processes=1"]))
    for start in range(2):
        for host in struck:
            add_strike(run.folder, host, f"hosts.0.{start}", "went down")
    found = Found({host: (f"{host}.net", [1, 2]) for host in there}, {})
    monkeypatch.setattr(hosts_module, "look_at", lambda *_: found)
    [spec] = plan(run.config, run, ["train"], Options("hosts", "config.yaml"))
    here = hosts_place(run, spec, [])
    ready = here.ready(spec, lambda: True)
    assert "".join(here.nodes) == taken and (ready.nodes, ready.ranks) == (len(taken), len(taken))
    assert here.rendezvous(ready)["MASTER_ADDR"] == f"{taken[0]}.net"
    assert here.does_without(struck) == (bool(struck) and not {*struck} & {*taken})


# ---- what is refused


@pytest.mark.parametrize("words, said", table("""
    --cluster hosts -> No hosts are named. Give --hosts a,b,c, or set launch.hosts in a cluster profile.
    --hosts a,b,a,c -> launch.hosts names a more than once
    --hosts a,b --nodes 4 -> train requests 4 hosts, but launch.hosts names 2
    --hosts a,b launch.train.min_nodes=3 -> launch.train.min_nodes is 3, but training requests 2 nodes
    --hosts me@localhost,b -> launch.hosts names me@localhost, which on every host means the host itself
    --hosts a,-oProxyCommand=x -> launch.hosts
    --hosts a,b --cluster local -> --cluster local is given. Leave one of them out.
    --hosts a,b launch.srun_args=[--mpi=none] -> need Slurm's srun
    --hosts a,b launch.secrets=[NOT_THERE] -> launch.secrets names NOT_THERE
    --hosts a,b --rehearse -> --rehearse is for jobs on Slurm"""))
def test_wrong_options(launcher, words, said):
    assert said in launcher.refused(f"--stage train,shard,tokenizer,encode {words}")


def test_the_plan_of_hosts(launcher):
    said = launcher.accepted("--stage all --hosts a,b,c,d --dry-run launch.processes=2")
    assert "cluster   hosts (a, b, c, d)" in said and "8 ranks x 4 threads, 4 hosts" in said


def test_a_folder_that_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(on_host, "SEEN_S", 0.0)
    assert not on_host.try_folder(tmp_path / "token.host", 1)["seen"] and not [*tmp_path.iterdir()]
