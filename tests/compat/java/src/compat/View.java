package compat;

import java.io.IOException;
import java.io.RandomAccessFile;
import java.io.UncheckedIOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.BooleanSupplier;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.kafka.common.TopicPartition;

/** The state that a growing delivery log describes so far, with waits for later states. Only one thread uses a view. */
final class View {
    static final double WAIT_SECONDS = 45;
    private static final long POLL_MS = 10;
    private static final double QUIET_MS = 1100;
    private static final Pattern FIELD = Pattern.compile("\"(\\w+)\":(?:\"([^\"]*)\"|([^,}]+))");

    private final Path path;
    private final Failures failures;
    private long position;

    final Map<String, Set<TopicPartition>> owned = new TreeMap<>();
    final Map<String, Integer> deliveredBy = new HashMap<>();
    /** Number of assigned events of each member. An assignment has one such event for each of its partitions. */
    final Map<String, Integer> assignments = new HashMap<>();
    final Set<String> produced = new HashSet<>();
    final Set<String> delivered = new HashSet<>();
    int deliveries;
    int revocations;
    private double lastOwnershipMs;
    private double lastDeliveryMs;

    View(Path path, Failures failures) {
        this.path = path;
        this.failures = failures;
    }

    /** Read the complete lines that were added. */
    void refresh() {
        byte[] added;
        try (RandomAccessFile file = new RandomAccessFile(path.toFile(), "r")) {
            added = new byte[(int) (file.length() - position)];
            file.seek(position);
            file.readFully(added);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        int whole = added.length;
        while (whole > 0 && added[whole - 1] != '\n') {
            whole--;
        }
        position += whole;
        new String(added, 0, whole, StandardCharsets.UTF_8).lines().forEach(this::apply);
    }

    private void apply(String line) {
        Map<String, String> entry = new HashMap<>();
        Matcher matcher = FIELD.matcher(line);
        while (matcher.find()) {
            entry.put(matcher.group(1), matcher.group(2) != null ? matcher.group(2) : matcher.group(3));
        }
        String member = entry.get("member");
        TopicPartition partition = new TopicPartition(
                entry.getOrDefault("topic", ""), Integer.parseInt(entry.getOrDefault("partition", "-1")));
        double t = Double.parseDouble(entry.get("t"));
        switch (entry.get("event")) {
            case "assigned" -> {
                lastOwnershipMs = t;
                owned.computeIfAbsent(member, name -> new HashSet<>()).add(partition);
                assignments.merge(member, 1, Integer::sum);
            }
            case "revoked", "lost" -> {
                lastOwnershipMs = t;
                if (owned.getOrDefault(member, Set.of()).contains(partition)) {
                    owned.get(member).remove(partition);
                    revocations++;
                }
            }
            case "closed", "killed" -> owned.remove(member);
            case "delivered" -> {
                delivered.add(partition + "@" + entry.get("offset"));
                deliveries++;
                lastDeliveryMs = t;
                deliveredBy.merge(member, 1, Integer::sum);
            }
            case "produced" -> produced.add(partition + "@" + entry.get("offset"));
            default -> { }
        }
    }

    /** Wait until the log makes `predicate` true. After `seconds`, throw an AssertionError with the ownership. */
    void waitFor(BooleanSupplier predicate, String what, double seconds) throws InterruptedException {
        long deadline = System.nanoTime() + (long) (seconds * 1e9);
        while (true) {
            refresh();
            failures.check();
            if (predicate.getAsBoolean()) {
                return;
            }
            if (System.nanoTime() > deadline) {
                throw new AssertionError(what + ": not within " + (int) seconds + " s; owned: " + owned + "; "
                        + delivered.size() + " of " + produced.size() + " records");
            }
            Thread.sleep(POLL_MS);
        }
    }

    void waitFor(BooleanSupplier predicate, String what) throws InterruptedException {
        waitFor(predicate, what, WAIT_SECONDS);
    }

    /**
     * Wait until each partition has exactly one owner, all `members` own a balanced share, and no other member owns a
     * partition.
     */
    void waitSettled(Collection<String> members, Set<TopicPartition> partitions, double seconds)
            throws InterruptedException {
        waitFor(() -> settled(members, partitions), partitions.size() + " partitions settled over " + members, seconds);
    }

    void waitSettled(Collection<String> members, Set<TopicPartition> partitions) throws InterruptedException {
        waitSettled(members, partitions, WAIT_SECONDS);
    }

    private boolean settled(Collection<String> members, Set<TopicPartition> partitions) {
        if (!owned.keySet().containsAll(members)) {
            return false;
        }
        Set<TopicPartition> all = new HashSet<>();
        int count = 0;
        int low = partitions.size() / members.size();
        int high = (partitions.size() + members.size() - 1) / members.size();
        for (Map.Entry<String, Set<TopicPartition>> entry : owned.entrySet()) {
            int share = entry.getValue().size();
            boolean due = members.contains(entry.getKey());
            if (due ? share < low || share > high : share > 0) {
                return false;
            }
            all.addAll(entry.getValue());
            count += share;
        }
        return all.equals(partitions) && count == partitions.size();
    }

    /** Wait until every record acknowledged so far was delivered. */
    void waitCaughtUp() throws InterruptedException {
        refresh();
        Set<String> wanted = Set.copyOf(produced);
        waitFor(() -> delivered.containsAll(wanted), wanted.size() + " records delivered");
    }

    /** Wait for `count` more deliveries. */
    void waitMore(int count) throws InterruptedException {
        refresh();
        int wanted = deliveries + count;
        waitFor(() -> deliveries >= wanted, count + " more records delivered");
    }

    /**
     * Wait until records have flowed for QUIET_MS without a rebalance, so that the checker can tell the last rebalance
     * from the next one.
     */
    void waitQuiet() throws InterruptedException {
        waitFor(() -> lastDeliveryMs - lastOwnershipMs > QUIET_MS, "records flow and nothing moves");
    }

    int deliveredBy(String member) {
        return deliveredBy.getOrDefault(member, 0);
    }

    int assignments(String member) {
        return assignments.getOrDefault(member, 0);
    }
}
