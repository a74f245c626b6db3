"""Wake-on-LAN: the packets, and what this machine says of itself."""

from shoal.domain.worker import valid_hardware_addresses
from shoal.worker.magic_packets import call_machine, hardware_addresses, magic_packet

ADDRESS = "02:00:5e:10:00:ff"


def test_a_packet_repeats_the_address_sixteen_times() -> None:
    packet = magic_packet(ADDRESS)

    assert packet[:6] == b"\xff" * 6
    assert packet[6:] == bytes.fromhex("02005e1000ff") * 16


def test_the_addresses_of_this_machine_are_valid() -> None:
    found = hardware_addresses()

    assert valid_hardware_addresses(found) == found


def test_nobody_is_called_at_what_is_no_address() -> None:
    assert valid_hardware_addresses(["02:00", "02:00:5E:10:00:FF", ADDRESS]) == (
        ADDRESS,
    )
    call_machine(["no address"])
