package compat;

import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.consumer.OffsetOutOfRangeException;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.header.internals.RecordHeader;

/** Scenarios in which a consumer reads produced records unchanged, from any offset or timestamp. */
final class DataScenarios {
    private static final int BIG_BYTES = 900_000;
    private static final Duration READ_LIMIT = Duration.ofSeconds(10);

    private DataScenarios() {}

    static void register(Map<String, Body> scenarios) {
        for (String codec : List.of("none", "gzip", "snappy", "lz4", "zstd")) {
            scenarios.put("data.codec." + codec, run -> codec(run, codec));
        }
        scenarios.put("data.idempotent", DataScenarios::idempotent);
        scenarios.put("data.seek_and_times", DataScenarios::seekAndTimes);
        scenarios.put("data.delete_records", DataScenarios::deleteRecords);
    }

    private static void codec(Run run, String codec) {
        String topic = run.topic(1);
        List<ProducerRecord<byte[], byte[]>> sent = new ArrayList<>();
        sent.add(new ProducerRecord<>(topic, 0, null, bytes("plain")));
        List<Header> headers = List.of(
                new RecordHeader("h", bytes("v")),
                new RecordHeader("h", bytes("w")),
                new RecordHeader("nothing", (byte[]) null),
                new RecordHeader("ünï", new byte[0]));
        sent.add(new ProducerRecord<>(topic, 0, bytes("k"), bytes("keyed"), headers));
        sent.add(new ProducerRecord<>(topic, 0, bytes("tombstone"), null));
        sent.add(new ProducerRecord<>(topic, 0, new byte[0], new byte[0]));
        for (int index = 0; index < 50; index++) {
            sent.add(new ProducerRecord<>(topic, 0, bytes("" + index), bytes(("value " + index).repeat(20))));
        }
        byte[] big = new byte[BIG_BYTES];
        for (int index = 0; index < BIG_BYTES; index++) {
            big[index] = (byte) (index * 7919 % 251);
        }
        sent.add(new ProducerRecord<>(topic, 0, bytes("big"), big));
        send(run, Map.of("compression.type", codec, "linger.ms", 5), sent);
        List<ConsumerRecord<byte[], byte[]>> received;
        try (KafkaConsumer<byte[], byte[]> consumer = reader(run, topic, 0)) {
            received = read(consumer, sent.size());
        }
        Check.equal(received.size(), sent.size(), "records");
        for (int index = 0; index < sent.size(); index++) {
            ProducerRecord<byte[], byte[]> original = sent.get(index);
            ConsumerRecord<byte[], byte[]> record = received.get(index);
            String where = "at offset " + index;
            Check.equal(record.offset(), (long) index, "offset");
            Check.that(Arrays.equals(record.key(), original.key()), "the key " + where);
            Check.that(Arrays.equals(record.value(), original.value()), "the value " + where);
            Check.equal(
                    Arrays.asList(record.headers().toArray()),
                    Arrays.asList(original.headers().toArray()),
                    "headers " + where);
        }
    }

    /** Send small batches, five of them in flight, and then use a second producer. All are stored once, in order. */
    private static void idempotent(Run run) {
        String topic = run.topic(2);
        Map<String, Object> configs = Map.of(
                "enable.idempotence", true,
                "max.in.flight.requests.per.connection", 5,
                "batch.size", 200);
        for (int start : new int[] {0, 500}) {
            List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
            for (int index = start; index < start + 500; index++) {
                records.add(new ProducerRecord<>(topic, index % 2, null, bytes("" + index)));
            }
            send(run, configs, records);
        }
        for (int partition = 0; partition < 2; partition++) {
            try (KafkaConsumer<byte[], byte[]> consumer = reader(run, topic, partition)) {
                List<ConsumerRecord<byte[], byte[]>> records = read(consumer, 500);
                Check.equal(records.size(), 500, "records");
                for (int index = 0; index < 500; index++) {
                    String value = new String(records.get(index).value(), StandardCharsets.UTF_8);
                    Check.equal(value, "" + (2 * index + partition), "the value at offset " + index);
                }
                TopicPartition key = new TopicPartition(topic, partition);
                Check.equal(consumer.endOffsets(List.of(key)).get(key), 500L, "the end");
            }
        }
    }

    private static void seekAndTimes(Run run) {
        String topic = run.topic(1);
        TopicPartition partition = new TopicPartition(topic, 0);
        List<TopicPartition> partitions = List.of(partition);
        long baseMs = System.currentTimeMillis() - 100_000;
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (int index = 0; index < 10; index++) {
            records.add(new ProducerRecord<>(topic, 0, baseMs + index * 1000L, null, bytes("" + index)));
        }
        send(run, Map.of(), records);
        try (KafkaConsumer<byte[], byte[]> consumer = reader(run, topic, 0)) {
            Check.equal(consumer.beginningOffsets(partitions).get(partition), 0L, "the beginning");
            Check.equal(consumer.endOffsets(partitions).get(partition), 10L, "the end");
            Check.equal(offsetAt(consumer, partition, 0), 0L, "the offset at 0");
            Check.equal(offsetAt(consumer, partition, baseMs + 3000), 3L, "the offset at +3000 ms");
            Check.equal(offsetAt(consumer, partition, baseMs + 3001), 4L, "the offset at +3001 ms");
            Check.equal(offsetAt(consumer, partition, baseMs + 9001), null, "the offset at +9001 ms");
            consumer.seek(partition, 7);
            Check.equal(offsets(read(consumer, 3)), List.of(7L, 8L, 9L), "after a seek to 7");
            consumer.seekToBeginning(partitions);
            Check.equal(consumer.position(partition), 0L, "the position at the beginning");
            Check.equal(read(consumer, 1).get(0).timestamp(), baseMs, "the first timestamp");
            consumer.seekToEnd(partitions);
            Check.equal(consumer.position(partition), 10L, "the position at the end");
            send(run, Map.of(), List.of(new ProducerRecord<>(topic, 0, null, bytes("after the end"))));
            Check.equal(offsets(read(consumer, 1)), List.of(10L), "after the end");
        }
        Map<String, Object> strict = Map.of("auto.offset.reset", "none");
        try (KafkaConsumer<byte[], byte[]> consumer = run.clients.consumer(strict)) {
            consumer.assign(partitions);
            consumer.seek(partition, 12);
            Check.fails(OffsetOutOfRangeException.class, () -> read(consumer, 1), "reading beyond the end");
        }
    }

    private static void deleteRecords(Run run) {
        String topic = run.topic(1);
        TopicPartition partition = new TopicPartition(topic, 0);
        List<ProducerRecord<byte[], byte[]>> records = new ArrayList<>();
        for (int index = 0; index < 10; index++) {
            records.add(new ProducerRecord<>(topic, 0, null, bytes("" + index)));
        }
        send(run, Map.of(), records);
        long low = Clients.get(run.clients.admin()
                        .deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(6)))
                        .lowWatermarks()
                        .get(partition))
                .lowWatermark();
        Check.equal(low, 6L, "the low watermark");
        Check.fails(
                org.apache.kafka.common.errors.OffsetOutOfRangeException.class,
                () -> Clients.get(run.clients.admin()
                        .deleteRecords(Map.of(partition, RecordsToDelete.beforeOffset(11)))
                        .all()),
                "deleting beyond the end");
        try (KafkaConsumer<byte[], byte[]> consumer = reader(run, topic, 0)) {
            Check.equal(consumer.beginningOffsets(List.of(partition)).get(partition), 6L, "the beginning");
            Check.equal(offsets(read(consumer, 4)), List.of(6L, 7L, 8L, 9L), "what is left");
            consumer.seek(partition, 2);
            Check.equal(offsets(read(consumer, 1)), List.of(6L), "an offset before the beginning is reset");
        }
    }

    static void send(Run run, Map<String, Object> configs, List<ProducerRecord<byte[], byte[]>> records) {
        Map<String, Object> all = new HashMap<>(configs);
        try (KafkaProducer<byte[], byte[]> producer = run.clients.producer(all)) {
            List<Future<RecordMetadata>> futures = records.stream().map(producer::send).toList();
            futures.forEach(Clients::get);
        }
    }

    /** Create a consumer without a group that reads one partition from the beginning. */
    private static KafkaConsumer<byte[], byte[]> reader(Run run, String topic, int partition) {
        KafkaConsumer<byte[], byte[]> consumer = run.clients.consumer(Map.of());
        consumer.assign(List.of(new TopicPartition(topic, partition)));
        return consumer;
    }

    /** Return the next `count` records, or fewer if they do not arrive in time. */
    private static List<ConsumerRecord<byte[], byte[]>> read(KafkaConsumer<byte[], byte[]> consumer, int count) {
        List<ConsumerRecord<byte[], byte[]>> records = new ArrayList<>();
        long deadline = System.nanoTime() + READ_LIMIT.toNanos();
        while (records.size() < count && System.nanoTime() < deadline) {
            consumer.poll(Duration.ofMillis(500)).forEach(records::add);
        }
        return count < records.size() ? records.subList(0, count) : records;
    }

    private static Long offsetAt(KafkaConsumer<byte[], byte[]> consumer, TopicPartition partition, long timestampMs) {
        OffsetAndTimestamp found = consumer.offsetsForTimes(Map.of(partition, timestampMs)).get(partition);
        return found == null ? null : found.offset();
    }

    private static List<Long> offsets(List<ConsumerRecord<byte[], byte[]>> records) {
        return records.stream().map(ConsumerRecord::offset).toList();
    }

    static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }
}
