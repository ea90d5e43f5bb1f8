"""Facts from files and libraries. Layer: real files, no GPU."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from megatron_rl.preflight import gather_machine
from megatron_rl.preflight.gather_software import gather_software, nccl_environment
from megatron_rl.preflight.library_names import read_only_data, variable_names


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def elf_library(path: Path, contents: bytes) -> Path:
    """A minimal ELF64 file with the sections .text and .rodata."""
    names = b"\0.text\0.rodata\0.shstrtab\0"
    header_size, entry = 64, 64
    offset_names = header_size + len(contents)
    offset_table = offset_names + len(names)

    def section(name: bytes, offset: int, size: int) -> bytes:
        return struct.pack(
            "<IIQQQQIIQQ", names.index(b"\0" + name + b"\0") + 1, 1, 0, 0, offset, size, 0, 0, 1, 0
        )

    header = b"\x7fELF\x02\x01\x01" + bytes(9)
    header += struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, offset_table, 0, 64, 0, 0, entry, 3, 2)
    table = section(b".text", header_size, 4)
    table += section(b".rodata", header_size, len(contents))
    table += section(b".shstrtab", offset_names, len(names))
    path.write_bytes(header + contents + names + table)
    return path


def test_variable_names_come_from_the_read_only_data(tmp_path):
    contents = (
        b"\0\0\0\0x\0NCCL_DEBUG\0say NCCL_NOISE please\0NCCL_IB_HCA\0TORCH_NCCL_A\0NCCL_low\0"
    )
    library = elf_library(tmp_path / "libnccl.so.2", contents)
    assert read_only_data(library) == contents
    assert variable_names([library], ("NCCL_",)) == {"NCCL_DEBUG", "NCCL_IB_HCA"}


@pytest.mark.parametrize(
    "contents", [b"", b"plain text", b"\x7fELF\x02\x01" + bytes(8), b"\x7fELF"]
)
def test_other_files_are_no_library(tmp_path, contents):
    path = tmp_path / "lib.so"
    path.write_bytes(contents)
    with pytest.raises(ValueError):
        read_only_data(path)
    assert variable_names([path, tmp_path / "missing.so"], ("NCCL_",)) is None


def test_names_of_the_installed_torch():
    folder = Path(torch.__file__).parent / "lib"
    libraries = sorted(folder.glob("libtorch_c*.so"))
    assert "TORCH_FR_BUFFER_SIZE" in variable_names(libraries, ("TORCH_NCCL_", "TORCH_FR_"))


def test_rdma_ports_from_sysfs(tmp_path):
    assert gather_machine.rdma_ports(tmp_path / "absent") is None
    port = tmp_path / "mlx5_0/ports/1"
    write(port / "state", "4: ACTIVE")
    write(port / "phys_state", "5: LinkUp")
    write(port / "rate", "400 Gb/sec (4X NDR)")
    write(port / "link_layer", "InfiniBand")
    write(tmp_path / "mlx5_1/ports/2/state", "1: DOWN")
    up, down = gather_machine.rdma_ports(tmp_path)
    assert (up.device, up.port, up.state, up.physical_state) == ("mlx5_0", 1, "ACTIVE", "LinkUp")
    assert (up.rate_gbps, up.link_layer) == (400.0, "InfiniBand")
    assert (down.device, down.port, down.state, down.rate_gbps) == ("mlx5_1", 2, "DOWN", None)


def test_interfaces_from_sysfs(tmp_path):
    write(tmp_path / "eth0/operstate", "up")
    write(tmp_path / "eth0/speed", "25000")
    write(tmp_path / "eth1/operstate", "down")
    write(tmp_path / "eth1/speed", "-1")
    write(tmp_path / "lo/operstate", "unknown")
    write(tmp_path / "bonding_masters", "")
    found = gather_machine.interfaces(tmp_path)
    assert [(i.name, i.up, i.speed_gbps) for i in found] == [
        ("eth0", True, 25.0),
        ("eth1", False, None),
        ("lo", True, None),
    ]


def test_gpus_from_nvidia_smi():
    full = (
        "0, NVIDIA H100 80GB HBM3, 81559, 0, No, No, Not Active\n"
        "1, NVIDIA H100 80GB HBM3, 81559, 2, Yes, No, Active\n"
    )
    healthy, sick = gather_machine.parse_gpus(full)
    assert (healthy.index, healthy.uncorrected_ecc_errors, healthy.remapping_pending) == (
        0,
        0,
        False,
    )
    assert healthy.memory_gib == pytest.approx(79.65, abs=0.01)
    assert (sick.uncorrected_ecc_errors, sick.remapping_pending, sick.hardware_slowdown) == (
        2,
        True,
        True,
    )
    (old,) = gather_machine.parse_gpus("0, Tesla V100, 16160, [N/A], [N/A], [N/A], [N/A]")
    assert old.uncorrected_ecc_errors is None and old.remapping_failed is None
    (short,) = gather_machine.parse_gpus("3, GeForce, 8192")
    assert (short.index, short.hardware_slowdown) == (3, None)


def test_nccl_configuration_files_are_read_and_the_environment_wins(tmp_path):
    system, personal = tmp_path / "nccl.conf", tmp_path / "mine.conf"
    write(system, "# NCCL_ALGO=Ring\nNCCL_DEBUG=INFO\nNCCL_IB_HCA = mlx5\n\nno assignment")
    write(personal, "NCCL_DEBUG=WARN")
    merged = nccl_environment({"HOME": "/h"}, (system, personal, tmp_path / "absent"))
    assert merged == {"HOME": "/h", "NCCL_DEBUG": "WARN", "NCCL_IB_HCA": "mlx5"}
    assert nccl_environment({"NCCL_DEBUG": "NONE"}, (personal,)) == {"NCCL_DEBUG": "NONE"}


def test_this_machine_is_described(tmp_path):
    machine = gather_machine.gather_machine(tmp_path / "not/yet/there")
    assert any(i.name == "lo" for i in machine.interfaces)
    assert machine.disk_free > 0 and machine.checkpoint_dir_writable is True
    assert machine.limits["nofile"] is None or machine.limits["nofile"] > 0
    assert machine.clock_synchronised in (True, False, None)


def test_this_software_is_described():
    software = gather_software()
    assert software.packages["torch"] == torch.__version__
    assert software.megatron_origin == software.megatron_installed
    assert any(text.startswith("torch") for text in software.requirements["megatron-core"])


def test_checkout_of_megatron_on_the_path_is_seen(tmp_path, monkeypatch):
    """A second `megatron` folder before site-packages shadows the installed one."""
    from megatron_rl.preflight import gather_software as module

    write(tmp_path / "shadowed/__init__.py", "")
    write(tmp_path / "shadowed/core/__init__.py", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert module._origin("shadowed.core") == str(tmp_path / "shadowed/core/__init__.py")
    assert module._origin("no_such_module_at_all") is None


@pytest.mark.parametrize(
    ("folders", "verdict"), [(["multi_tensor_apply", "optimizers"], "nvidia"), (["lib"], "other")]
)
def test_apex_is_told_by_what_it_holds(tmp_path, monkeypatch, folders, verdict):
    from megatron_rl.versions import installed_apex

    for folder in folders:
        write(tmp_path / f"apex/{folder}/__init__.py", "")
    write(tmp_path / "apex/__init__.py", "")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed_apex() == verdict
