"""Consume-process-produce transactions of aiokafka, by workers that assign themselves their partitions.

The one idea: aiokafka names no member when it sends offsets to a transaction, so a group cannot fence a former owner
(KIP-447). Each worker therefore owns the same partitions for ever, and its transactional id fences its earlier
producers.
"""

# The type stubs of these clients declare only a part of their API.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import random
import uuid
from collections.abc import Sequence
from typing import Any

import aiokafka
from aiokafka.errors import KafkaError

from tests.aiokafka_stop import stop_aiokafka
from tests.trust.history import number_in
from tests.trust.patience import CALL_S
from tests.trust.workloads import ABORTED, STUCK_S, Workload

START_S = 60.0


class AssignedTransfers(Workload):
    """Workers that turn each source record into one result, in one transaction with the offsets."""

    def __init__(
        self,
        bootstrap: str,
        source: str,
        target: str,
        *,
        workers: int,
        source_partitions: int,
        target_partitions: int,
        seed: int,
    ) -> None:
        self.group = f"assigned-{uuid.uuid4().hex[:6]}"
        super().__init__(self.group)
        self.source, self.target, self.bootstrap = source, target, bootstrap
        self._target_partitions = target_partitions
        self._chance = random.Random(seed)
        self.transferred = 0
        """Number of source records whose transaction was committed."""
        for number in range(workers):
            owned = [aiokafka.TopicPartition(source, index) for index in range(number, source_partitions, workers)]
            self._thread(lambda number=number, owned=owned: self._run(number, owned), f"{self.group}-w{number}")

    def _run(self, number: int, owned: Sequence[aiokafka.TopicPartition]) -> None:
        while not self._stopping.is_set():
            asyncio.run(self._live(f"{self.group}-{number}", owned))

    async def _live(self, name: str, owned: Sequence[aiokafka.TopicPartition]) -> None:
        """Transfer records until a call fails or the workload ends. The worker's next client begins at the committed
        offsets.
        """
        producer = aiokafka.AIOKafkaProducer(
            bootstrap_servers=self.bootstrap, client_id=name, transactional_id=name, transaction_timeout_ms=30_000
        )
        consumer = aiokafka.AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap,
            client_id=name,
            group_id=self.group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
        )
        try:
            # Once the producer has started, the transaction of the worker's previous client is over.
            await asyncio.wait_for(producer.start(), START_S)
            consumer.assign(owned)
            await asyncio.wait_for(consumer.start(), START_S)
            while not self._stopping.is_set():
                batches = await consumer.getmany(timeout_ms=200, max_records=50)
                records = [record for batch in batches.values() for record in batch]
                if records and not await asyncio.wait_for(self._transfer(producer, records), STUCK_S):
                    return
        except (KafkaError, TimeoutError):
            pass  # The producer was fenced, timed out or cut off. The worker's next client reads the committed offsets.
        finally:
            with contextlib.suppress(KafkaError, TimeoutError):
                await asyncio.wait_for(stop_aiokafka(consumer), CALL_S)
            with contextlib.suppress(KafkaError, TimeoutError):
                await asyncio.wait_for(producer.stop(), CALL_S)

    async def _transfer(self, producer: aiokafka.AIOKafkaProducer, records: Sequence[Any]) -> bool:
        """Transfer the records. Return False if the transaction was aborted: the consumer's position is then behind
        these records.
        """
        await producer.begin_transaction()
        sent = [
            await producer.send(self.target, record.value, partition=number_in(record.value) % self._target_partitions)
            for record in records
        ]
        await asyncio.gather(*sent)
        ends = {aiokafka.TopicPartition(self.source, record.partition): record.offset + 1 for record in records}
        await producer.send_offsets_to_transaction(ends, self.group)
        if self._chance.random() < ABORTED:
            await producer.abort_transaction()
            return False
        await producer.commit_transaction()
        self.transferred += len(records)
        return True
