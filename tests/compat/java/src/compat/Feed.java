package compat;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.KafkaException;

/**
 * Produces a record to each partition again and again, and records each acknowledgement. With `outage`, failed records
 * are ignored.
 */
final class Feed extends Thread {
    private static final long INTERVAL_MS = 20;
    private static final long STOP_MS = 60_000;

    private final Clients clients;
    private final String topic;
    private final int partitions;
    private final Journal journal;
    private final Failures failures;
    private final boolean outage;
    private volatile boolean stopRequested;

    Feed(Clients clients, String topic, int partitions, Journal journal, Failures failures, boolean outage) {
        super("feed");
        setDaemon(true);
        this.clients = clients;
        this.topic = topic;
        this.partitions = partitions;
        this.journal = journal;
        this.failures = failures;
        this.outage = outage;
    }

    @Override
    public void run() {
        try (KafkaProducer<byte[], byte[]> producer = clients.producer(Map.of())) {
            while (!stopRequested) {
                round(producer, topic, partitions, journal, outage);
                Thread.sleep(INTERVAL_MS);
            }
        } catch (KafkaException | ExecutionException error) {
            failures.add("the producer failed: " + error);
        } catch (InterruptedException error) {
            failures.add("the producer was interrupted");
        }
    }

    /** Send one record to each partition, and wait for the acknowledgements. */
    static void round(
            KafkaProducer<byte[], byte[]> producer, String topic, int partitions, Journal journal, boolean outage)
            throws ExecutionException, InterruptedException {
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (int partition = 0; partition < partitions; partition++) {
            ProducerRecord<byte[], byte[]> record =
                    new ProducerRecord<>(topic, partition, null, Long.toString(System.nanoTime()).getBytes());
            sent.add(producer.send(record, (metadata, error) -> {
                if (error == null) {
                    journal.produced(topic, metadata.partition(), metadata.offset());
                }
            }));
        }
        for (Future<RecordMetadata> future : sent) {
            try {
                future.get();
            } catch (ExecutionException error) {
                if (!outage) {
                    throw error;
                }
            }
        }
    }

    void requestStop() {
        stopRequested = true;
    }

    /** End after the current round. */
    void finish() throws InterruptedException {
        requestStop();
        join(STOP_MS);
        if (isAlive()) {
            throw new AssertionError("the producer hangs");
        }
        failures.check();
    }
}
