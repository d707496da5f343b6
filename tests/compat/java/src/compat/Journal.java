package compat;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.time.Instant;
import java.util.Collection;
import java.util.Comparator;
import java.util.List;
import java.util.Locale;
import org.apache.kafka.common.TopicPartition;

/**
 * A delivery log that threads and processes append to. Each event is one write to a file opened for appending, so the
 * log of a killed member contains exactly what it had done.
 */
final class Journal implements AutoCloseable {
    final Path path;
    private final FileChannel channel;

    Journal(Path path) throws IOException {
        this.path = path;
        channel = FileChannel.open(path, StandardOpenOption.CREATE, StandardOpenOption.WRITE, StandardOpenOption.APPEND);
    }

    void scenario(String topic, int partitions, boolean cooperative, boolean redeliveryAllowed) {
        write(List.of(String.format(
                Locale.ROOT,
                "\"event\":\"scenario\",\"mode\":\"%s\",\"topic\":\"%s\",\"partitions\":%d,\"redelivery_allowed\":%b",
                cooperative ? "cooperative" : "eager",
                topic,
                partitions,
                redeliveryAllowed)));
    }

    void produced(String topic, int partition, long offset) {
        write(List.of(String.format(
                Locale.ROOT,
                "\"event\":\"produced\",\"topic\":\"%s\",\"partition\":%d,\"offset\":%d",
                topic,
                partition,
                offset)));
    }

    void delivered(String member, String topic, int partition, long offset) {
        write(List.of(String.format(
                Locale.ROOT,
                "\"event\":\"delivered\",\"member\":\"%s\",\"topic\":\"%s\",\"partition\":%d,\"offset\":%d",
                member,
                topic,
                partition,
                offset)));
    }

    /** Append one line for each partition. `event` is assigned, revoked or lost. */
    void ownership(String event, String member, Collection<TopicPartition> partitions) {
        write(partitions.stream()
                .sorted(Comparator.comparing(TopicPartition::topic).thenComparing(TopicPartition::partition))
                .map(partition -> String.format(
                        Locale.ROOT,
                        "\"event\":\"%s\",\"member\":\"%s\",\"topic\":\"%s\",\"partition\":%d",
                        event,
                        member,
                        partition.topic(),
                        partition.partition()))
                .toList());
    }

    void closed(String member) {
        write(List.of("\"event\":\"closed\",\"member\":\"" + member + "\",\"partition\":-1"));
    }

    void killed(String member) {
        write(List.of("\"event\":\"killed\",\"member\":\"" + member + "\",\"partition\":-1"));
    }

    private synchronized void write(List<String> events) {
        if (events.isEmpty()) {
            return;
        }
        Instant now = Instant.now();
        long micros = now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
        String t = String.format(Locale.ROOT, "%d.%03d", micros / 1000, micros % 1000);
        StringBuilder lines = new StringBuilder();
        for (String event : events) {
            lines.append("{\"t\":").append(t).append(',').append(event).append("}\n");
        }
        ByteBuffer bytes = ByteBuffer.wrap(lines.toString().getBytes(StandardCharsets.UTF_8));
        try {
            while (bytes.hasRemaining()) {
                channel.write(bytes);
            }
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    static String escaped(String text) {
        StringBuilder escaped = new StringBuilder();
        for (char character : text.toCharArray()) {
            if (character == '"' || character == '\\') {
                escaped.append('\\').append(character);
            } else if (character < ' ') {
                escaped.append(String.format(Locale.ROOT, "\\u%04x", (int) character));
            } else {
                escaped.append(character);
            }
        }
        return escaped.toString();
    }

    @Override
    public void close() throws IOException {
        channel.close();
    }
}
