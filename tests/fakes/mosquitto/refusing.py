"""Just enough of an MQTT 5 broker to refuse messages with a reason mosquitto never gives."""

from __future__ import annotations

import socket
import threading

QUOTA_EXCEEDED = 0x97


class RefusingBroker:
    """Acknowledges everything, but answers the first `refusals` events "quota exceeded"."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.refused = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="refusing-broker", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def _run(self) -> None:
        while not self._closing:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock, sock.makefile("rb") as stream:
                while True:
                    head = stream.read(1)
                    if not head:
                        break
                    length, shift = 0, 0
                    while True:
                        byte = stream.read(1)[0]
                        length |= (byte & 0x7F) << shift
                        shift += 7
                        if not byte & 0x80:
                            break
                    self._answer(sock, head[0] >> 4, stream.read(length))

    def _answer(self, sock: socket.socket, kind: int, body: bytes) -> None:
        if kind == 1:  # CONNECT
            sock.sendall(b"\x20\x03\x00\x00\x00")
        elif kind == 3:  # PUBLISH, QoS 1
            topic_end = 2 + int.from_bytes(body[:2], "big")
            mid = body[topic_end : topic_end + 2]
            if b"/evt/xid" in body[:topic_end] and self.refused < self.refusals:
                self.refused += 1
                sock.sendall(b"\x40\x03" + mid + bytes([QUOTA_EXCEEDED]))
            else:
                sock.sendall(b"\x40\x02" + mid)
        elif kind == 8:  # SUBSCRIBE: as many "granted QoS 1" as it may need
            sock.sendall(b"\x90\x05" + body[:2] + b"\x00\x01\x01")
        elif kind == 12:  # PINGREQ
            sock.sendall(b"\xd0\x00")

    def __enter__(self) -> RefusingBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing = True
        # Wakes accept().
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
        except OSError:
            pass
        self._listener.close()
        self._thread.join(5)
