import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.StringJoiner;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.atomic.AtomicReference;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * The Java producer with its default settings. Its arguments are BOOTSTRAP TOPIC WARM_UP_S SECONDS RECORDS_PER_S, and
 * {@code bench/producers.py} describes them and the output.
 */
public final class Produce {
    private static final int RECORD_BYTES = 1024;
    private static final int PAYLOADS = 1000;

    private final KafkaProducer<byte[], byte[]> producer;
    private final String topic;
    private final int recordsPerS;
    private final byte[][] payloads = new byte[PAYLOADS][RECORD_BYTES];
    private final AtomicLong acknowledged = new AtomicLong();
    private final AtomicReference<Exception> failure = new AtomicReference<>();
    /** The producer's only network thread adds to this list. `main` reads the list after `close`. */
    private final List<Double> latenciesMs = new ArrayList<>();
    private long sent;

    private Produce(String bootstrap, String topic, int recordsPerS) {
        this.producer = new KafkaProducer<>(
            Map.of("bootstrap.servers", bootstrap), new ByteArraySerializer(), new ByteArraySerializer());
        this.topic = topic;
        this.recordsPerS = recordsPerS;
        Random random = new Random();
        for (byte[] payload : payloads) {
            random.nextBytes(payload);
        }
    }

    public static void main(String[] arguments) throws Exception {
        Produce run = new Produce(arguments[0], arguments[1], Integer.parseInt(arguments[4]));
        run.sendFor(Double.parseDouble(arguments[2]), false);
        System.out.println("warm");
        long before = run.acknowledged.get();
        double tookS = run.sendFor(Double.parseDouble(arguments[3]), true);
        System.out.println("done " + (run.acknowledged.get() - before) + " " + tookS);
        run.producer.close();
        if (run.failure.get() != null) {
            throw run.failure.get();
        }
        StringJoiner line = new StringJoiner(" ");
        for (double latencyMs : run.latenciesMs) {
            line.add(Double.toString(latencyMs));
        }
        System.out.println(line);
    }

    private double sendFor(double seconds, boolean measured) {
        long startNs = System.nanoTime();
        long first = sent;
        long endNs = startNs + (long) (seconds * 1e9);
        long nowNs;
        while ((nowNs = System.nanoTime()) - endNs < 0 && failure.get() == null) {
            if (recordsPerS > 0) {
                long earlyNs = startNs + (long) ((sent - first) * 1e9 / recordsPerS) - nowNs;
                if (earlyNs > 0) {
                    LockSupport.parkNanos(Math.min(earlyNs, endNs - nowNs));
                    continue;
                }
            }
            send(nowNs, measured && recordsPerS > 0);
        }
        return (System.nanoTime() - startNs) / 1e9;
    }

    private void send(long sentNs, boolean timed) {
        producer.send(new ProducerRecord<>(topic, payloads[(int) (sent % PAYLOADS)]), (metadata, error) -> {
            if (error != null) {
                failure.set(error);
                return;
            }
            acknowledged.incrementAndGet();
            if (timed) {
                latenciesMs.add((System.nanoTime() - sentNs) / 1e6);
            }
        });
        sent++;
    }
}
