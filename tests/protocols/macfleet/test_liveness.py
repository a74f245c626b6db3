"""The liveness of peers, at the moments that it names itself."""

from shoal.protocols.macfleet.liveness import SILENCE_MAX, HeartbeatLiveness


def test_silent_peer_is_lost_at_the_deadline_whatever_the_rounding() -> None:
    # Else its timer is set to the same moment again, for as long as the clock stands.
    for step in range(1, 2000):
        liveness = HeartbeatLiveness(0.0)
        liveness.next_heartbeat(1e6)
        last = step * 0.03 + 1e-14
        liveness.on_activity(last)

        assert liveness.deadline == last + SILENCE_MAX
        assert liveness.lost_reason(liveness.deadline) == "silent for 10 s"
        assert liveness.lost_reason(last + SILENCE_MAX - 0.01) == ""
