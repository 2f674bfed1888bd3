"""Four requests and two servers, one of which begins to drain unseen: one refusal, four answers."""

import asyncio

from endpoint_lifecycle import (
    AsyncEndpointDirectory,
    AsyncReservation,
    Draining,
    EndpointOwner,
    EndpointRecord,
    error_body,
    http_status,
)


async def main() -> None:
    owners = {f"http://10.0.0.{n}:8000": EndpointOwner(f"ctx-{n}", f"process-{n}", "context") for n in (1, 2)}
    records = {url: owner.finalize().publish([f"tcp://{url[7:-5]}:7000"]) for url, owner in owners.items()}

    async def fetch(server: str) -> EndpointRecord:
        return records[server]  # stands for GET {server}/server_info

    async def send(reservation: AsyncReservation) -> tuple[int, object]:  # stands for one POST
        try:
            with owners[reservation.server].admit(reservation.generation):
                return 200, f"served by {reservation.server}"
        except Draining as error:
            return http_status(error), error_body(error)

    async with AsyncEndpointDirectory(fetch) as directory:
        for url in owners:
            directory.add_server(url, "context")
        await directory.prepare()
        owners["http://10.0.0.1:8000"].start_draining()  # the directory does not know yet
        for request_id in range(4):
            print(await directory.dispatch("context", request_id, send))


asyncio.run(main())
