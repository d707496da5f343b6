package compat;

import java.util.List;
import java.util.concurrent.CopyOnWriteArrayList;

/** What ended members and feeds that should have gone on. */
final class Failures {
    private final List<String> messages = new CopyOnWriteArrayList<>();

    void add(String message) {
        messages.add(message);
    }

    List<String> all() {
        return messages;
    }

    void check() {
        if (!messages.isEmpty()) {
            throw new AssertionError(String.join("; ", messages));
        }
    }
}
