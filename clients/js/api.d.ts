/** What the service answers. Made from its OpenAPI document by `scripts/client.py`. */

/** A trial. */
export interface ABTestOut {
  trial_id: string;
  kind: "interleaving" | "settings" | "shadow";
  /** The version that was active when the trial began. */
  version_a: string;
  /** The version that is tested against it. The same as `version_a` in a trial of settings alone. */
  version_b: string;
  share: number;
  /** The settings of arm B in a trial of kind `settings`; else null. */
  settings: Record<string, unknown> | null;
  /** The lists for which a trial of kind `settings` is tuned; else null. */
  planned_lists: number | null;
  status: "running" | "ended";
  created_at: string;
  ended_at: string | null;
  /** The result. Of a running trial: so far, and only for `GET` of this one trial. Of interleaving, `series` is the difference over time, and `planned` the result of the first `planned_clicked` lists with a click, once there are so many. */
  report: Record<string, unknown> | null;
  /** The lists with a click after which the difference is to be read; null for shadow trials, and for those of older versions of the service. */
  planned_clicked: number | null;
}

/** Trials, newest first. */
export interface ABTestPage {
  items: ABTestOut[];
  next_cursor: string | null;
}

/** A change of the active version. */
export interface ActivationOut {
  /** Grows with every change. */
  generation: number;
  version: string | null;
  /** The version active before; the version itself if it was pinned or unpinned. */
  previous: string | null;
  reason: "published" | "activated" | "rolled_back" | "returned";
  detail: Record<string, unknown> | null;
  at: string;
  /** The id of the key that asked for it; `admin` for `NCR_ADMIN_KEY`, `local` where there are no keys, `ncr` for the command. Null for the service itself. */
  by: string | null;
}

/** Changes of the active version, newest first. */
export interface ActivationPage {
  items: ActivationOut[];
  next_cursor: string | null;
}

/** The answer of `POST /recommend`. */
export interface BasketRecommendation {
  /** Send it with the events that the list leads to: clicks are counted by it. */
  recommendation_id: string;
  /** Null where the body names none. */
  user: string | null;
  model_version: string | null;
  /** Every event of this user up to here has been taken in. */
  as_of_seq: number;
  took_ms: number;
  /** Best first. */
  items: RecommendedItem[];
  /** Send it as `cursor` with the same parameters for the next places. Null at the end, and after 1,000 places; the page after may be empty. */
  next_cursor: string | null;
  /** Those of `items` and `item` that do not exist. */
  ignored: string[];
}

/** The answer of `POST /recommend/batch`. */
export interface BatchAnswer {
  /** In the order of the users. */
  results: (BatchList | BatchRefusal)[];
}

/** The list of one of the users of a batch. */
export interface BatchList {
  /** Send it with the events that the list leads to: clicks are counted by it. */
  recommendation_id: string;
  user: string;
  model_version: string | null;
  /** Every event of this user up to here has been taken in. */
  as_of_seq: number;
  took_ms: number;
  /** Best first. */
  items: RecommendedItem[];
  /** Send it as `cursor` with the same parameters for the next places. Null at the end, and after 1,000 places; the page after may be empty. */
  next_cursor: string | null;
  status: 200;
}

/** Why one of the users of a batch gets none. */
export interface BatchRefusal {
  /** As of an answer by itself. */
  status: number;
  code: string;
  detail: string;
}

/** One of the user's own items, and what it does for a place. */
export interface Because {
  id: string;
  title: string | null;
  /** By how much the log-odds that the item is preferred to the other items shown would be lower, on average, if the user had not had this one. */
  effect: number;
}

/** Click-through of a version's lists. */
export interface ClickThrough {
  /** Lists that were served. */
  lists: number;
  /** Lists whose `recommendation_id` came back with a positive event. */
  clicked: number;
  /** 0 to 1; null if no list was served. */
  rate: number | null;
}

/** The answer of `POST /compare`. */
export interface Comparison {
  user: string;
  model_version: string;
  /** Every event of this user up to here has been taken in. */
  as_of_seq: number;
  /** `popular`: nothing is known of the user, the probabilities are those of the mean of all users. */
  source: "model" | "fold_in" | "popular";
  /** Each once: what the rows and columns stand for. */
  items: string[];
  /** How probably the user prefers the item of the row to that of the column. */
  probability: number[][];
  /** The items, best first. */
  order: string[];
}

/** An event in a user's history. */
export interface EventOut {
  seq: number;
  event_id: string;
  user: string;
  item: string;
  type: string;
  value: number | null;
  timestamp: string;
}

/** A page of a user's history. */
export interface EventPage {
  items: EventOut[];
  next_cursor: string | null;
}

/** The outcome of the rows of `POST /events`. */
export interface EventsAnswer {
  accepted: number;
  duplicates: number;
  rejected: RejectedRow[];
  last_seq: number;
}

/** An item. */
export interface ItemOut {
  id: string;
  title: string | null;
  categories: string[];
  hidden: boolean;
  attributes: Record<string, unknown>;
  available_from: string | null;
  available_until: string | null;
  embedding: number[] | null;
}

/** A page of the catalogue. */
export interface ItemPage {
  items: ItemOut[];
  next_cursor: string | null;
}

/** The outcome of the rows of `POST /items`. */
export interface ItemsAnswer {
  accepted: number;
  rejected: RejectedItem[];
}

/** The response to a request for a job. */
export interface JobAccepted {
  job_id: string;
}

/** A job. */
export interface JobOut {
  job_id: string;
  kind: string;
  status: "queued" | "running" | "succeeded" | "failed" | "cancelled" | "rejected";
  params: Record<string, unknown>;
  progress: JobProgress | null;
  attempt: number;
  created_at: string;
  started_at: string | null;
  finished_at: string | null;
  model_version: string | null;
  metrics: Record<string, unknown> | null;
  error: string | null;
  /** The id of the key that asked for it; `admin` for `NCR_ADMIN_KEY`, `local` where there are no keys, `ncr` for the command. Null for the service itself. */
  by: string | null;
}

/** Jobs, newest first. */
export interface JobPage {
  items: JobOut[];
  next_cursor: string | null;
}

/** The progress of a running job. */
export interface JobProgress {
  phase: string;
  epoch: number;
  epochs: number;
  loss: number | null;
  /** NDCG@10 on the validation items. */
  ndcg: number | null;
  /** Seconds left, as far as it can be told. */
  eta_s: number | null;
  /** The most memory that the job's process has held at a time. */
  peak_bytes?: number | null;
}

/** What a merge has moved. */
export interface MergeOut {
  id: string;
  into: string;
  events: number;
  preferences: number;
  /** For `min_seq`: a list of `into` that takes in what moved. */
  last_seq: number;
}

/** A model version with its activations and click-through. */
export interface ModelDetail {
  version: string;
  active: boolean;
  /** Newer versions are not activated until it is unpinned. */
  pinned: boolean;
  /** `rejected` by the gate; `deleted`: only its metrics are kept, not its files. */
  status: "published" | "rejected" | "deleted";
  model: string;
  factors: number;
  /** The model was trained on the events up to this seq. */
  trained_seq: number;
  users: number;
  items: number;
  interactions: number;
  metrics: Record<string, unknown>;
  params: Record<string, unknown>;
  job_id: string | null;
  created_at: string;
  activated_at: string | null;
  /** When and why it was activated, newest first, at most 100. */
  activations: ActivationOut[];
  click_through: ClickThrough;
}

/** A model version. */
export interface ModelOut {
  version: string;
  active: boolean;
  /** Newer versions are not activated until it is unpinned. */
  pinned: boolean;
  /** `rejected` by the gate; `deleted`: only its metrics are kept, not its files. */
  status: "published" | "rejected" | "deleted";
  model: string;
  factors: number;
  /** The model was trained on the events up to this seq. */
  trained_seq: number;
  users: number;
  items: number;
  interactions: number;
  metrics: Record<string, unknown>;
  params: Record<string, unknown>;
  job_id: string | null;
  created_at: string;
  activated_at: string | null;
}

/** Models, newest first. */
export interface ModelPage {
  items: ModelOut[];
  next_cursor: string | null;
}

/** The active version, and whether it is pinned. */
export interface PinOut {
  version: string | null;
  /** The version that a rollback leads to. */
  previous: string | null;
  pinned: boolean;
}

/** A popular item. */
export interface PopularItem {
  id: string;
  title: string | null;
  rank: number;
  /** Users with a positive event about it, each once. */
  users: number;
}

/** The answer of `GET /popular`. */
export interface PopularItems {
  /** Null: all time. */
  window: string | null;
  /** Most users first. */
  items: PopularItem[];
  /** Send it as `cursor` with the same parameters for the next places. Null at the end, and after 1,000 places; the page after may be empty. */
  next_cursor: string | null;
}

/** The seq of a stored preference, in the order of all events and preferences. */
export interface PreferenceAnswer {
  seq: number;
}

/** The outcome of the rows of a list of preferences. */
export interface PreferencesAnswer {
  accepted: number;
  rejected: RejectedRow[];
  last_seq: number;
}

/** An error as in RFC 9457. `code` is stable; `detail` is for people. */
export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  code: string;
  request_id?: string;
}

/** Which of the two would the user rather have? The answer goes to `POST /preferences`. */
export interface Question {
  a: QuestionItem;
  b: QuestionItem;
  /** Bits that the answer is expected to tell of the user's taste, beyond those of the questions before it; null where no model knows. */
  information: number | null;
}

/** An item that is asked about. */
export interface QuestionItem {
  id: string;
  title: string | null;
}

/** Questions, the most telling first. */
export interface Questions {
  user: string;
  model_version: string | null;
  as_of_seq: number;
  source: "model" | "popular";
  items: Question[];
  /** Why there are no questions; null where there are. */
  reason: "seen_everything" | "asked_everything" | "too_few_items" | null;
}

/** The answer of `GET /recommend/{user}` and `POST /rerank`. */
export interface Recommendation {
  /** Send it with the events that the list leads to: clicks are counted by it. */
  recommendation_id: string;
  user: string;
  model_version: string | null;
  /** Every event of this user up to here has been taken in. */
  as_of_seq: number;
  took_ms: number;
  /** Best first. */
  items: RecommendedItem[];
  /** Send it as `cursor` with the same parameters for the next places. Null at the end, and after 1,000 places; the page after may be empty. */
  next_cursor: string | null;
}

/** One place of the list. */
export interface RecommendedItem {
  /** With `include=categories`. Otherwise it is not there. */
  categories?: string[];
  /** With `include=attributes`. Otherwise it is not there. */
  attributes?: Record<string, unknown>;
  id: string;
  title: string | null;
  /** From 1. */
  rank: number;
  /** Mean probability that the user prefers the item to the model's reference items; comparable within a model version. Null for `popular`. */
  score: number | null;
  /** `model`: known to the model; `fold_in`: with events or attributes it was not trained on; `popular`: nothing is known of the user, or the item is not known to the model. */
  source: "model" | "fold_in" | "popular";
  /** Probability that the user prefers the item to the one a rank below. Null where it is not known, as of the last item. */
  preferred_over_next: number | null;
  /** With `explain=pairwise`: up to three of the user's own items, those that it is due to most, the first one most of all; empty for `popular`. Otherwise it is not there. */
  because?: Because[];
}

/** A rejected item, by its index in the list. */
export interface RejectedItem {
  index: number;
  code: string;
  detail: string;
}

/** A rejected row, by its index in the request. */
export interface RejectedRow {
  index: number;
  code: string;
  detail: string;
}

/** A rejected user, by its index in the list. */
export interface RejectedUser {
  index: number;
  code: string;
  detail: string;
}

/** An item that is like another. */
export interface SimilarItem {
  /** With `include=categories`. Otherwise it is not there. */
  categories?: string[];
  /** With `include=attributes`. Otherwise it is not there. */
  attributes?: Record<string, unknown>;
  id: string;
  title: string | null;
  /** Its similarity, at most 1. */
  score: number;
}

/** The answer of `GET /items/{id}/similar`. */
export interface SimilarItems {
  /** Send it with the events that the list leads to: clicks are counted by it. */
  recommendation_id: string;
  item: string;
  /** The version that `score` is by: the cosine of what it knows of the items, their popularity left out. Null where the model does not know the item, or there is no model: then it is the cosine of who took them up. */
  model_version: string | null;
  /** Most alike first. */
  items: SimilarItem[];
  /** Send it as `cursor` with the same parameters for the next places. Null at the end, and after 1,000 places; the page after may be empty. */
  next_cursor: string | null;
}

/** A signed token. */
export interface TokenOut {
  token: string;
  expires_at: string;
}

/** An item on the rise. */
export interface TrendingItem {
  id: string;
  title: string | null;
  rank: number;
  /** Users in the window, each once. */
  users: number;
  /** Users in the window before. */
  users_before: number;
}

/** The answer of `GET /trending`. */
export interface TrendingItems {
  window: string;
  /** The clearest rise first. */
  items: TrendingItem[];
  /** Send it as `cursor` with the same parameters for the next places. Null at the end, and after 1,000 places; the page after may be empty. */
  next_cursor: string | null;
}

/** A user. */
export interface UserOut {
  id: string;
  attributes: Record<string, unknown>;
  created_at: string;
}

/** A page of users. */
export interface UserPage {
  items: UserOut[];
  next_cursor: string | null;
}

/** The outcome of the rows of `POST /users`. */
export interface UsersAnswer {
  accepted: number;
  rejected: RejectedUser[];
}
