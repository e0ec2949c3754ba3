-- A store as Chairlift made it before responses knew whose they are.
CREATE TABLE responses (
    id TEXT PRIMARY KEY,
    created REAL NOT NULL,
    used REAL NOT NULL,
    bytes INTEGER NOT NULL,
    owner TEXT,
    body TEXT NOT NULL,
    events BLOB
) WITHOUT ROWID;
CREATE INDEX responses_by_use ON responses (used);
CREATE TABLE items (
    number INTEGER PRIMARY KEY,
    id TEXT NOT NULL,
    uses INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX items_by_id ON items (id);
CREATE TABLE conversations (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
    position INTEGER NOT NULL,
    item INTEGER NOT NULL,
    output INTEGER NOT NULL,
    PRIMARY KEY (response, position)
) WITHOUT ROWID;
CREATE TABLE owners (id TEXT PRIMARY KEY, seen REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE total (bytes INTEGER NOT NULL);
INSERT INTO total VALUES (0);
CREATE TRIGGER item_added AFTER INSERT ON items BEGIN
    UPDATE total SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER item_removed AFTER DELETE ON items BEGIN
    UPDATE total SET bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER response_added AFTER INSERT ON responses BEGIN
    UPDATE total SET bytes = bytes + NEW.bytes;
END;
CREATE TRIGGER response_removed AFTER DELETE ON responses BEGIN
    UPDATE total SET bytes = bytes - OLD.bytes;
END;
CREATE TRIGGER place_added AFTER INSERT ON conversations BEGIN
    UPDATE items SET uses = uses + 1 WHERE number = NEW.item;
END;
CREATE TRIGGER place_removed AFTER DELETE ON conversations BEGIN
    UPDATE items SET uses = uses - 1 WHERE number = OLD.item;
    DELETE FROM items WHERE number = OLD.item AND uses <= 0;
END;
PRAGMA user_version = 1;
